"""Checks that an exported or imported model computes the same."""
