"""Needle in a haystack and the retrieval tasks."""
