"""Heads of semantic segmentation, and the networks of a backbone and a head."""
