"""The label of pixels that belong to no class; losses, scores, transforms and data agree on it."""

IGNORE_INDEX = 255
"""As in mmsegmentation. Masks are 8-bit, so there are at most 254 classes."""
