"""Commands of `alibi-lm`, by what they are for."""
