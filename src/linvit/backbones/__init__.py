"""Backbones: timm's contract, any attention inside."""
