"""Checkpoint callbacks whose files are whole, and whose failures end no run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.checkpoint.api import CheckpointException

from linvit.callbacks.checkpoint_io import AtomicCheckpointIO, is_remote
from linvit.files import publish, remove, temporary

WRITE_FOLDERS = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)  # themselves, without the plug-in


class NotSavedError(Exception):
    """A checkpoint was not saved; all ranks raise it alike."""


class CrashSafeCheckpoint(ModelCheckpoint):
    """Lightning's `ModelCheckpoint`, which writes by `AtomicCheckpointIO`, and does not end the run when it cannot.

    If a checkpoint cannot be written, because the disk is full or read-only, it says so, takes back what it noted of
    it (the best score), and tries again the next time.

    Attributes:
        failure: Why the last attempt to save failed, or None if it did not.
        failed_at: When it failed, by `time.monotonic()`.
    """

    failure: str | None = None
    failed_at = 0.0
    _noted: tuple[dict[str, Any], int]

    @property
    def state_key(self) -> str:
        """Lightning's, so that checkpoints written with its own class can be resumed."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replaces Lightning's own plug-in for files; another that the user chose stays."""
        super().setup(trainer, pl_module, stage)
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores all of `state_dict`; Lightning leaves the current score out."""
        super().load_state_dict(state_dict)
        self.current_score = state_dict.get("current_score")

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        with self._taking_back():
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        with self._taking_back():
            super()._save_last_checkpoint(trainer, monitor_candidates)

    @contextmanager
    def _taking_back(self) -> Iterator[None]:
        """Restores what was noted before, such as the best score, if the block cannot save."""
        self._noted = deepcopy(self.state_dict()), self._last_global_step_saved
        try:
            yield
        except NotSavedError:
            self.take_back()

    def take_back(self) -> None:
        """Restores what was noted before the last attempt to save."""
        noted, self._last_global_step_saved = self._noted
        self.load_state_dict(noted)

    def published(self, trainer: Trainer, path: Path) -> None:
        """Is called on rank 0 when a file is complete."""

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Saves; every save of Lightning's class comes here.

        Raises:
            NotSavedError: On all ranks, if one could not write.
        """
        path = Path(filepath)
        in_folder = isinstance(trainer.strategy, WRITE_FOLDERS) and not is_remote(filepath)
        prepared = temporary(path) if in_folder else path
        reason = None
        try:
            super()._save_checkpoint(trainer, str(prepared) if in_folder else filepath)
        except (OSError, CheckpointException) as error:
            reason = _reason(error)
            trainer.strategy.barrier("Trainer.save_checkpoint")  # where the other ranks wait
        if trainer.is_global_zero:
            try:
                if in_folder and reason is None:
                    publish(prepared, path)
                if in_folder:
                    remove(prepared)
                if reason is None:
                    self.published(trainer, path)
            except OSError as error:
                reason = _reason(error)
        self._last_checkpoint_saved = filepath
        reason = trainer.strategy.broadcast(reason)
        self.failure = None if reason is None else f"checkpoint '{filepath}' could not be saved: {reason}"
        if self.failure is not None:
            self.failed_at = time.monotonic()
            rank_zero_warn(
                f"step {trainer.global_step}: {self.failure}. What lay there before is as it was. The run goes on, and "
                f"saves again as soon as it can"
            )
            raise NotSavedError(self.failure)


def _reason(error: BaseException) -> str:
    """What the operating system says, without the file."""
    return getattr(error, "strerror", None) or str(error)
