"""Corpora, tokenizers, token files, blending and sampling."""
