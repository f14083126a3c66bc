"""Transforms of samples: decoding, geometry, pixel operations, augmentation, operations on the device."""
