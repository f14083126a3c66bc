"""Variants of one configuration, run with several seeds, and the table that they amount to."""
