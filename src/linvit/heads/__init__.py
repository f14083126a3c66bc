"""Heads for dense prediction: they map the features of a backbone to a prediction for every pixel."""
