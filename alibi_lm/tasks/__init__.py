"""Synthetic retrieval tasks: pure generators of prompts and answers; they know no model."""
