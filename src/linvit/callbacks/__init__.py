"""Callbacks: what a run logs, and the reports that it writes. One is imported on its first use."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from linvit.callbacks.attention.maps import AttentionMaps
    from linvit.callbacks.attention.rank import AttentionRank
    from linvit.callbacks.bad_images import BadImageCount
    from linvit.callbacks.class_report import ClassReport
    from linvit.callbacks.exact_resume import ExactResume
    from linvit.callbacks.final_score import FinalScore
    from linvit.callbacks.gradient_norm import GradientNorm
    from linvit.callbacks.image_count import ImageCount
    from linvit.callbacks.image_grid import ImageGrid
    from linvit.callbacks.memory import Memory
    from linvit.callbacks.non_finite import NonFiniteGuard
    from linvit.callbacks.prediction_writer import PredictionWriter
    from linvit.callbacks.save_checkpoints import SaveCheckpoints
    from linvit.callbacks.stop_on_signal import StopOnSignal
    from linvit.callbacks.throughput import Throughput

_LAZY = {
    "AttentionMaps": "linvit.callbacks.attention.maps",
    "AttentionRank": "linvit.callbacks.attention.rank",
    "BadImageCount": "linvit.callbacks.bad_images",
    "ClassReport": "linvit.callbacks.class_report",
    "ExactResume": "linvit.callbacks.exact_resume",
    "FinalScore": "linvit.callbacks.final_score",
    "GradientNorm": "linvit.callbacks.gradient_norm",
    "ImageCount": "linvit.callbacks.image_count",
    "ImageGrid": "linvit.callbacks.image_grid",
    "Memory": "linvit.callbacks.memory",
    "NonFiniteGuard": "linvit.callbacks.non_finite",
    "PredictionWriter": "linvit.callbacks.prediction_writer",
    "SaveCheckpoints": "linvit.callbacks.save_checkpoints",
    "StopOnSignal": "linvit.callbacks.stop_on_signal",
    "Throughput": "linvit.callbacks.throughput",
}

__all__ = [
    "AttentionMaps",
    "AttentionRank",
    "BadImageCount",
    "ClassReport",
    "ExactResume",
    "FinalScore",
    "GradientNorm",
    "ImageCount",
    "ImageGrid",
    "Memory",
    "NonFiniteGuard",
    "PredictionWriter",
    "SaveCheckpoints",
    "StopOnSignal",
    "Throughput",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'linvit.callbacks' has no attribute '{name}'")
