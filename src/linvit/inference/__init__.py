"""Loads the results of a run for prediction, without its trainer and data."""
