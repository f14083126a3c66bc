"""Whole steps on a CUDA device that is not there: errors of device and dtype, launches, and waits for the device."""
