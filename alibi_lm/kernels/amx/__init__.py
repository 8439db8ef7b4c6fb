"""Attention with linear biases and the loss in C++, compiled on the machine that runs them."""
