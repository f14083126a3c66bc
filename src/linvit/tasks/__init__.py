"""Tasks: training and scoring of networks. Each is imported on first use: a run loads no code of the others."""

from typing import TYPE_CHECKING

from linvit.registry.source import deferred
from linvit.tasks.base import Task as Task

if TYPE_CHECKING:
    from linvit.tasks.classification import ClassificationTask as ClassificationTask
    from linvit.tasks.detection.task import DetectionTask as DetectionTask
    from linvit.tasks.features import FeatureTask as FeatureTask
    from linvit.tasks.segmentation.task import SegmentationTask as SegmentationTask
    from linvit.tasks.teacher import Teacher as Teacher

__getattr__, _deferred = deferred(__name__, __file__)
__all__ = sorted(["Task", *_deferred])
