"""The training engines: everything that knows the insides of DeepSpeed."""
