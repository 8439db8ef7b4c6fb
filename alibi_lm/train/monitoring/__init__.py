"""Metrics, metric writers and hardware figures."""
