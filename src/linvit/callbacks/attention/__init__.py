"""Logging of a run's attention: ranks and other statistics of its matrices, and its maps."""
