"""The certified attention span of each head."""
