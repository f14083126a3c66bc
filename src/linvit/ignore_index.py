"""Label of pixels that belong to no class, used by losses, scores, transforms and data."""

IGNORE_INDEX = 255
"""As in mmsegmentation. Masks are 8-bit, so there are at most 254 classes."""
