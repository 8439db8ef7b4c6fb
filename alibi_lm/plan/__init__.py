"""What a run will hold, compute and send on every rank, worked out without starting it."""
