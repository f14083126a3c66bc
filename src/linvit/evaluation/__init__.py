"""Evaluates a trained network on sets such as ImageNet-C and ImageNet-V2 and writes a page."""
