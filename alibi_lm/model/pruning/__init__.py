"""Attention that leaves out keys whose weight is provably negligible."""
