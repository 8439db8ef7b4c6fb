"""From documents to a tokenizer and token files."""
