"""Data modules: one loading path for embedded, on-disk and hub data."""

from linvit.data.classification import ClassificationData

__all__ = ["ClassificationData"]
