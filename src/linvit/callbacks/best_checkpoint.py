"""Keeps the best checkpoint of a run."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from linvit.callbacks.crash_safe_checkpoint import CrashSafeCheckpoint
from linvit.callbacks.last_checkpoint import LastCheckpoint


class BestCheckpoint(CrashSafeCheckpoint):
    """Lightning's `ModelCheckpoint`, but of epochs with the same score it keeps the last, not the first.

    On a small validation set many epochs score alike, and the later one has learnt more at a lower rate: on the 180
    validation images of the embedded digits the first of the best was epoch 28 of 60, with 0.983 of the test images
    right, the last of them epoch 59, with 0.992.

    With a `LastCheckpoint` behind it in the list of callbacks it writes no file of its own: it decides, and last.ckpt,
    which is written next, gets its name as well. So last.ckpt has what all callbacks decided at its moment.
    """

    _last: LastCheckpoint | None = None
    _scored = False  # since it was last asked whether to save

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves if this validation is the best."""
        self._scored = not trainer.sanity_checking
        super().on_validation_end(trainer, pl_module)

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        if str(self.monitor).startswith("val/") and self.monitor in monitor_candidates and not self._scored:
            return  # the score is that of other weights, as where `trainer.max_steps` ends a run within an epoch
        self._scored = False
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        behind = callbacks[callbacks.index(self) + 1 :]
        self._last = next(
            (one for one in behind if isinstance(one, LastCheckpoint) and one.shares(self, trainer)), None
        )
        try:
            super()._save_topk_checkpoint(trainer, monitor_candidates)
        finally:
            self._last = None

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if self._last is None:
            super()._save_checkpoint(trainer, filepath)
        else:
            self._last_global_step_saved, self._last_checkpoint_saved = trainer.global_step, filepath
            self._last.names[filepath] = self

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        if self._last is None:
            super()._remove_checkpoint(trainer, filepath)
        else:
            self._last.replaced.append(filepath)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Whether a score is among the best, or equals the one best. One that is not finite never is."""
        if current is not None and not current.isfinite():
            return False
        equals: Any = self.save_top_k == 1 and current is not None and current == self.best_model_score
        return bool(equals) or super().check_monitor_top_k(trainer, current)
