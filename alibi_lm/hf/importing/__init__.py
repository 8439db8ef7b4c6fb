"""Hugging Face folders to runs."""
