"""The tasks of RULER (arXiv 2404.06654)."""
