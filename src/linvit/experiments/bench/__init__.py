"""Costs of mechanisms and backbones: measured side by side over sizes, with crossovers, exponents and plots."""
