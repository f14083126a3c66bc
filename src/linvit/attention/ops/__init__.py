"""Mathematics that several mechanisms share."""
