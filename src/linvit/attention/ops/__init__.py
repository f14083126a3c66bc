"""Mathematics that several mechanisms use."""
