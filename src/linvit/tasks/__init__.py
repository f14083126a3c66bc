"""Tasks: what is trained and how it is scored."""

from linvit.tasks.base import Task
from linvit.tasks.classification import ClassificationTask
from linvit.tasks.detection.task import DetectionTask
from linvit.tasks.segmentation.task import SegmentationTask
from linvit.tasks.teacher import Teacher

__all__ = ["ClassificationTask", "DetectionTask", "SegmentationTask", "Task", "Teacher"]
