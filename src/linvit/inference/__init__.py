"""From what a run has left to predictions, without its trainer and data."""
