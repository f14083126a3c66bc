"""Experiments over many mechanisms, models or runs: what each costs, and which one wins."""
