"""Object detection and instance segmentation: the task, and COCO's evaluation."""
