"""Heads of object detection and instance segmentation, and the networks of a backbone and a head.

They compute what mmdetection 2.x computes, with which the papers train, on operators of torch and torchvision alone.
"""
