"""Long inputs: with pruned attention, and densely."""
