"""Errors, logging, files, memory and progress: what every package uses."""
