"""Heads of object detection and instance segmentation, and the networks of a backbone and a head.

They compute the same as mmdetection 2.x, with which the papers train, using only operators of torch and torchvision.
"""
