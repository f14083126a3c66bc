"""Attention mechanisms: one file each, opening with formula, paper and cost."""
