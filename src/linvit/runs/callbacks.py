"""The callbacks of every run of the command line; a task adds its own."""

import sys
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar, RichProgressBar, TQDMProgressBar

from linvit.callbacks import (
    BadImageCount,
    FinalScore,
    GradientNorm,
    ImageCount,
    Memory,
    StopOnSignal,
    Throughput,
)

REFRESH = 20  # steps


def default_callbacks() -> list[Callback]:
    """What every run logs, and what saves it at a signal."""
    logging = [LearningRateMonitor("step"), GradientNorm(), Throughput(), Memory(), BadImageCount(), ImageCount()]
    return [*logging, FinalScore(), StopOnSignal()]


def with_progress_bar(callbacks: Any) -> list[Callback]:
    """The callbacks of a configuration and a progress bar, unless they have one.

    It is redrawn every 20 steps. Lightning's own is redrawn at every step, and reads the loss each time, for which
    the processor must wait until the GPU has done all of its work.
    """
    given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
    if any(isinstance(callback, RichProgressBar) for callback in given):  # it draws by codes, and strips those of texts
        sys.stdout = getattr(sys.stdout, "unchecked", sys.stdout)
    if any(isinstance(callback, ProgressBar) for callback in given):
        return given
    return [*given, TQDMProgressBar(refresh_rate=REFRESH)]
