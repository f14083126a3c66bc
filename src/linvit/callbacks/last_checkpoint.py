"""Keeps the last state of a run, to go on from."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from linvit.callbacks.crash_safe_checkpoint import CrashSafeCheckpoint
from linvit.checkpointing.atomic_file import LAST, sweep
from linvit.checkpointing.checkpoint_io import in_words, is_remote
from linvit.checkpointing.lock import lock, unlock
from linvit.errors import UserError

RETRY = 60.0  # seconds


class LastCheckpoint(CrashSafeCheckpoint):
    """Writes last.ckpt after every epoch, and whenever `save` is called; the one before stays as previous.ckpt.

    Lightning's `save_last` writes only when the callback that keeps the best does. The folder is reserved for this run
    while it trains, and what killed runs left unfinished in it is deleted.
    """

    def __init__(self) -> None:
        super().__init__(filename=LAST.removesuffix(".ckpt"), enable_version_counter=False)

    def save(self, trainer: Trainer) -> bool:
        """Writes last.ckpt now; returns whether that succeeded, and warns if not.

        It is called on all ranks, between two optimiser steps.
        """
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            step = self._last_global_step_saved
            self._save_topk_checkpoint(trainer, {})
            self._last_global_step_saved = step  # if the epoch ends with this step, it is saved once more
        return self.failure is None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reserves the folder and tidies it up, before training starts.

        Raises:
            UserError: If another process has the folder.
        """
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and self._writes(trainer):
            on_rank_zero(trainer, reserve, Path(str(self.dirpath)))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raises a `UserError` if the disk has no room for two checkpoints, before hours of work."""
        if self._writes(trainer):
            parts = [*pl_module.parameters(), *pl_module.buffers()]
            size = sum(part.nbytes * (3 if part.requires_grad else 1) for part in parts)  # AdamW keeps two of each
            on_rank_zero(trainer, check_room_for_two, Path(str(self.dirpath)), size)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Tries again to save, a minute after it failed."""
        super().on_train_batch_end(trainer, pl_module, *args)
        if self.failure is not None and trainer.global_step != self._last_global_step_saved:
            between_steps = (args[-1] + 1) % trainer.accumulate_grad_batches == 0
            if trainer.strategy.broadcast(between_steps and time.monotonic() - self.failed_at > RETRY):
                self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tries a last time, if the last attempt failed."""
        super().on_train_end(trainer, pl_module)
        if self.failure is not None:
            self.save(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives the folder back."""
        if stage == "fit" and self.dirpath is not None:
            unlock(Path(self.dirpath))

    def _writes(self, trainer: Trainer) -> bool:
        """Whether the run saves to a folder of this machine's file systems."""
        return not trainer.fast_dev_run and not is_remote(str(self.dirpath))  # type: ignore[attr-defined]


def reserve(folder: Path) -> None:
    """Locks a folder and deletes what killed runs left unfinished in it."""
    lock(folder)
    for path in sweep(folder):
        rank_zero_info(f"deleted '{path}', which a run that was killed had left unfinished")


def check_room_for_two(folder: Path, size: int) -> None:
    """Raises a `UserError` if a disk has no room for two checkpoints of a size in bytes."""
    free = shutil.disk_usage(folder).free
    if free < 2 * size:
        raise UserError(
            f"the disk of '{folder}' has {in_words(free)} left, and a checkpoint of this model takes about "
            f"{in_words(size)}, of which it must hold two. Make room, or choose another disk with "
            f"--trainer.default_root_dir"
        )


def on_rank_zero(trainer: Trainer, check: Callable[..., None], *args: Any) -> None:
    """Calls a function on rank 0; if it raises a `UserError` or an `OSError` there, all ranks raise a `UserError`."""
    reason = None
    if trainer.is_global_zero:
        try:
            check(*args)
        except (UserError, OSError) as error:
            reason = str(error)
    reason = trainer.strategy.broadcast(reason)
    if reason is not None:
        raise UserError(reason)
