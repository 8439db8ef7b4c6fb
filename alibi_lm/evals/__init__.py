"""Long-context evaluations and the report."""
