"""Perplexity by context length."""
