"""What is done to a sample: decoding, geometry, pixel operations, augmentation, the finish on the device."""
