"""Heartbeats, failure detection and preemption."""
