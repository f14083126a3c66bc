"""What is done to a sample: decoding, geometry, pixel operations, augmentation, what is left to the device."""
