"""Runs: their configurations, folders and checkpoints; starting, resuming and ending a run."""
