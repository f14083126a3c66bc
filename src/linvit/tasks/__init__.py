"""Tasks: what is trained and how it is scored. One is imported on its first use: a run has no code of the others."""

import importlib
from typing import TYPE_CHECKING, Any

from linvit.tasks.base import Task

if TYPE_CHECKING:
    from linvit.tasks.classification import ClassificationTask
    from linvit.tasks.detection.task import DetectionTask
    from linvit.tasks.features import FeatureTask
    from linvit.tasks.segmentation.task import SegmentationTask
    from linvit.tasks.teacher import Teacher

_LAZY = {
    "ClassificationTask": "linvit.tasks.classification",
    "DetectionTask": "linvit.tasks.detection.task",
    "FeatureTask": "linvit.tasks.features",
    "SegmentationTask": "linvit.tasks.segmentation.task",
    "Teacher": "linvit.tasks.teacher",
}

__all__ = ["ClassificationTask", "DetectionTask", "FeatureTask", "SegmentationTask", "Task", "Teacher"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'linvit.tasks' has no attribute '{name}'")
