"""Hugging Face export."""
