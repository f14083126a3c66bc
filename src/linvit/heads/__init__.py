"""Heads for dense prediction: what turns the features of a backbone into the prediction for every pixel."""
