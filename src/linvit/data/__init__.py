"""Data modules: one loading path for embedded, on-disk and hub data."""

from linvit.data.classification import ClassificationData
from linvit.data.detection import DetectionData
from linvit.data.segmentation import SegmentationData

__all__ = ["ClassificationData", "DetectionData", "SegmentationData"]
