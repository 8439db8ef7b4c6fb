"""The decoder: slopes, attention with linear biases, layers, generation."""
