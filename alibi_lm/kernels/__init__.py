"""Optional compiled backends."""
