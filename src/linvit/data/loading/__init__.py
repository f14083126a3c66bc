"""Samplers, data loaders, and seeds of samples."""
