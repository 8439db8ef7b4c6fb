"""Runs to Hugging Face folders."""
