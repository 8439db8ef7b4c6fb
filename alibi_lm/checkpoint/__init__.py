"""Reading checkpoints: finding, verifying and loading steps of a run."""
