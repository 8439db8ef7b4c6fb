"""KV caches, long scoring and generation."""
