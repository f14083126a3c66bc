"""ImageNet-C: names of its corruptions, and AlexNet's errors (Hendrycks and Dietterich 2019, arXiv 1903.12261)."""

ALEXNET = {
    **{"gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.92264, "defocus_blur": 0.81988},
    **{"glass_blur": 0.826268, "motion_blur": 0.785948, "zoom_blur": 0.79836, "snow": 0.866816, "frost": 0.826572},
    **{"fog": 0.819324, "brightness": 0.564592, "contrast": 0.853204, "elastic_transform": 0.646056},
    **{"pixelate": 0.71784, "jpeg_compression": 0.6065},
}
"""AlexNet's published errors for the 15 corruptions of the mCE, the mean over the severities."""
CORRUPTIONS = {"c": [*ALEXNET], "c_extra": ["speckle_noise", "gaussian_blur", "spatter", "saturate"]}
"""Names of the folders of each set; those of `c_extra` are not part of the mCE."""
SEVERITIES = range(1, 6)
