"""The training engine, its loop, schedule and checkpoint writer."""
