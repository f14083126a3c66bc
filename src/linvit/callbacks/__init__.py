"""Callbacks: logging and reports of a run. Each is imported on first use."""

from typing import TYPE_CHECKING

from linvit.registry.source import deferred

if TYPE_CHECKING:
    from linvit.callbacks.attention.maps import AttentionMaps as AttentionMaps
    from linvit.callbacks.attention.measurement import AttentionRank as AttentionRank
    from linvit.callbacks.exact_resume import ExactResume as ExactResume
    from linvit.callbacks.monitors import BadImageCount as BadImageCount
    from linvit.callbacks.monitors import GradientNorm as GradientNorm
    from linvit.callbacks.monitors import ImageCount as ImageCount
    from linvit.callbacks.monitors import ImageGrid as ImageGrid
    from linvit.callbacks.monitors import LearningRates as LearningRates
    from linvit.callbacks.monitors import Memory as Memory
    from linvit.callbacks.monitors import Throughput as Throughput
    from linvit.callbacks.non_finite import NonFiniteGuard as NonFiniteGuard
    from linvit.callbacks.predictions import PredictionWriter as PredictionWriter
    from linvit.callbacks.report import ClassReport as ClassReport
    from linvit.callbacks.save_checkpoints import SaveCheckpoints as SaveCheckpoints
    from linvit.callbacks.stop_on_signal import StopOnSignal as StopOnSignal

__getattr__, __all__ = deferred(__name__, __file__)
