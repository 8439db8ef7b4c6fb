"""alibi_lm: distributed pretraining of language models with Attention with Linear Biases."""

__version__ = "0.1.0"
