"""Data modules: one loading path for embedded, on-disk and hub data. One is imported on its first use."""

from typing import TYPE_CHECKING

from linvit.registry.source import deferred

if TYPE_CHECKING:
    from linvit.data.classification import ClassificationData as ClassificationData
    from linvit.data.detection import DetectionData as DetectionData
    from linvit.data.diagnostics import DiagnosticData as DiagnosticData
    from linvit.data.diagnostics import PathfinderData as PathfinderData
    from linvit.data.segmentation import SegmentationData as SegmentationData
    from linvit.data.sources.scenes import Scenes as Scenes

__getattr__, __all__ = deferred(__name__, __file__)
