"""Keeps the last state of a run, to go on from."""

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


class LastCheckpoint(ModelCheckpoint):
    """Writes last.ckpt after every epoch, and whenever `save` is called.

    Lightning's `save_last` writes only when the callback that keeps the best does.
    """

    def __init__(self) -> None:
        super().__init__(filename="last", enable_version_counter=False)

    @property
    def state_key(self) -> str:
        """Lightning's, so that checkpoints written with its own class can be resumed."""
        return super().state_key.replace(type(self).__qualname__, ModelCheckpoint.__qualname__, 1)

    def save(self, trainer: Trainer) -> None:
        """Writes last.ckpt now. It is called between two optimiser steps, on all ranks."""
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.best_model_path = self.format_checkpoint_name({})
            trainer.save_checkpoint(self.best_model_path)
