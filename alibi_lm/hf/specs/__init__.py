"""How each transformers class lays out its weights."""
