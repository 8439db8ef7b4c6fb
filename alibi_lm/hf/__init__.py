"""Hugging Face folders: export and import."""
