"""Callbacks: what a run logs, and the reports that it writes. One is imported on its first use."""

import importlib
from typing import Any

_MODULES = {
    "AttentionMaps": "attention.maps",
    "AttentionRank": "attention.measurement",
    "BadImageCount": "monitors",
    "ClassReport": "report",
    "ExactResume": "exact_resume",
    "GradientNorm": "monitors",
    "ImageCount": "monitors",
    "ImageGrid": "monitors",
    "Memory": "monitors",
    "NonFiniteGuard": "non_finite",
    "PredictionWriter": "predictions",
    "SaveCheckpoints": "save_checkpoints",
    "StopOnSignal": "stop_on_signal",
    "Throughput": "monitors",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"linvit.callbacks.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'linvit.callbacks' has no attribute '{name}'")
