"""What mechanisms and backbones cost: measured side by side over sizes, with crossovers, exponents and plots."""
