"""Variants of one configuration, run with several seeds, and the table of their results."""
