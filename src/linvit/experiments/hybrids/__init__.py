"""Hybrids: a search of the attention of each block of a trained network."""
