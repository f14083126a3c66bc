"""What watches and keeps every run of the command line."""

from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, ProgressBar, TQDMProgressBar

from linvit.callbacks import BadImageCount, ClassReport, FinalScore, GradientNorm, ImageGrid, Memory, Throughput

REDRAW = 20  # steps


def watchers() -> list[Callback]:
    """What every run is watched by, and what keeps its last state."""
    watching = [LearningRateMonitor("step"), GradientNorm(), Throughput(), Memory(), ImageGrid(), BadImageCount()]
    return [*watching, ClassReport(), FinalScore(), keep_last()]


def keep_last() -> ModelCheckpoint:
    """Writes last.ckpt after every epoch; `save_last` of the one that keeps the best writes only when that does."""
    return ModelCheckpoint(filename="last", enable_version_counter=False)


def keep_best_average(checkpoint: Namespace) -> ModelCheckpoint | None:
    """Keeps the epoch whose moving average was best, as `checkpoint` says for the weights.

    None if that does not go by a score of validation.
    """
    monitor = checkpoint.monitor or ""
    if not monitor.startswith("val/"):
        return None
    name = {"monitor": monitor.replace("val/", "val/ema_"), "filename": f"{checkpoint.filename}_ema"}
    return ModelCheckpoint(**{**checkpoint.as_dict(), **name})


def with_progress_bar(callbacks: Any) -> list[Callback]:
    """The callbacks of a configuration and a progress bar, unless they have one.

    It is redrawn every 20 steps. Lightning's own is at every step, and each time reads the loss, for which the
    processor must wait until the GPU has done all of its work.
    """
    given = callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
    if any(isinstance(callback, ProgressBar) for callback in given):
        return given
    return [*given, TQDMProgressBar(refresh_rate=REDRAW)]
