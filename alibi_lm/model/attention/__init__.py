"""Attention with linear biases: the kernel table and its kernels."""
