"""Keeps the last state of a run, to go on from."""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from linvit.callbacks.checkpoint_io import AtomicCheckpointIO, in_words, is_remote
from linvit.callbacks.crash_safe_checkpoint import WRITE_FOLDERS, CrashSafeCheckpoint, NotSavedError
from linvit.errors import UserError
from linvit.files import LAST, PREVIOUS, link, lock, sweep, unlock

RETRY = 60.0  # seconds
SAME, REPLACED = "same_files", "replaced_files"
"""In a checkpoint: names of other files of its folder that are the same one, and of those that they replace."""


class LastCheckpoint(CrashSafeCheckpoint):
    """Writes last.ckpt after every epoch, and whenever `save` is called; the one before stays as previous.ckpt.

    Lightning's `save_last` writes only when the callback that keeps the best does. The folder is reserved for this run
    while it trains, and what killed runs left unfinished in it is deleted.

    It is the record of its moment: the loggers have written all rows before it, and the best checkpoints of the moment
    are further names of the same file, which it lists. So whatever a kill leaves, a run that goes on from it can make
    complete what belongs to it (`complete`), and does the rest again.

    Attributes:
        names: Files that are to be the next last.ckpt, too, and the callbacks that want them.
        replaced: Files that are to be deleted when that is done.
    """

    def __init__(self) -> None:
        super().__init__(filename=LAST.removesuffix(".ckpt"), enable_version_counter=False)
        self.names: dict[str, CrashSafeCheckpoint] = {}
        self.replaced: list[str] = []

    def shares(self, other: CrashSafeCheckpoint, trainer: Trainer) -> bool:
        """Whether another callback's files can be this one's by another name."""
        io, strategy = trainer.strategy.checkpoint_io, trainer.strategy
        plain = isinstance(io, AtomicCheckpointIO) and not isinstance(strategy, WRITE_FOLDERS)
        return plain and self._writes(trainer) and self.dirpath == other.dirpath and not other.save_weights_only

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

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Lists the other names of the file, and the files that they replace."""
        if self.names:
            checkpoint[SAME] = [Path(name).name for name in self.names]
            checkpoint[REPLACED] = [Path(name).name for name in self.replaced if name not in self.names]

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves at the end of each epoch, also where validation is within epochs or not after each."""
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._save_topk_checkpoint(trainer, {})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves after a validation within the epoch."""
        super().on_validation_end(trainer, pl_module)
        if self.names:
            self.save(trainer)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Has the loggers write what they have first."""
        log_now(trainer)
        for logger in trainer.loggers:
            logger.save()
        try:
            super()._save_checkpoint(trainer, filepath)
        except NotSavedError:
            for callback in self.names.values():
                callback.take_back()
            raise
        finally:
            self.names, self.replaced = {}, []

    def published(self, trainer: Trainer, path: Path) -> None:
        """Gives the file its other names."""
        for name, callback in self.names.items():
            link(path, Path(name))
            for logger in trainer.loggers:
                logger.after_save_checkpoint(callback)
        for name in self.replaced:
            if name not in self.names:
                Path(name).unlink(missing_ok=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Saves if another callback wants to; tries again a minute after it failed."""
        super().on_train_batch_end(trainer, pl_module, *args)
        if self.names:
            self.save(trainer)
        elif self.failure is not None and trainer.global_step != self._last_global_step_saved:
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


def log_now(trainer: Trainer) -> None:
    """Logs what a step or an epoch of training has logged, which Lightning does only after the hooks at its end."""
    connector = trainer._logger_connector
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if batch.processed > batch.completed:
        connector.update_train_step_metrics()
    elif trainer.training:
        connector.log_metrics(connector.metrics["log"], step=trainer.global_step - 1)


def complete(path: Path, same: Any, replaced: Any) -> None:
    """Does what is to follow when a checkpoint is written, since a kill may have come before.

    Nothing is done while another process has its folder. Anything but the names of other checkpoints is ignored.

    Args:
        path: The file.
        same: What it has under `SAME`.
        replaced: What it has under `REPLACED`.
    """

    def others(names: Any) -> list[Path]:
        given = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        plain = [name for name in given if Path(name).name == name and name.endswith(".ckpt")]
        return [path.with_name(name) for name in plain if name not in (path.name, LAST, PREVIOUS)]

    with suppress(UserError, OSError):
        lock(path.parent)
        for other in others(same):
            link(path, other)
        for other in others(replaced):
            other.unlink(missing_ok=True)
        unlock(path.parent)


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
