"""Studies that train several models."""
