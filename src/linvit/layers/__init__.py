"""What hosts share: the attention layer, position tables."""
