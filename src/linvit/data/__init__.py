"""Data modules: one loading path for embedded, on-disk and hub data. One is imported on its first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linvit.data.classification import ClassificationData
    from linvit.data.detection import DetectionData
    from linvit.data.diagnostics import DiagnosticData, PathfinderData
    from linvit.data.segmentation import SegmentationData
    from linvit.data.sources.scenes import Scenes

_LAZY = {
    "ClassificationData": "linvit.data.classification",
    "DetectionData": "linvit.data.detection",
    "DiagnosticData": "linvit.data.diagnostics",
    "PathfinderData": "linvit.data.diagnostics",
    "Scenes": "linvit.data.sources.scenes",
    "SegmentationData": "linvit.data.segmentation",
}

__all__ = ["ClassificationData", "DetectionData", "DiagnosticData", "PathfinderData", "Scenes", "SegmentationData"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'linvit.data' has no attribute '{name}'")
