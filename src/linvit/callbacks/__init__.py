"""Callbacks: what a run logs, and the reports that it writes."""

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
