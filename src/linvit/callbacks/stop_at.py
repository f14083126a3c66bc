"""Ends a run after some steps, and keeps a record of them: `linvit verify-resume` compares such runs."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor


class StopAt(Callback):
    """Writes a checkpoint after an optimiser step and ends the process there, as if it were killed.

    Args:
        step: Optimiser steps. A run that ends before writes its checkpoint then.
        checkpoint: The file.
        record: A file that gets a line for each batch: epoch, number, digest and loss, of the first rank.
    """

    def __init__(self, step: int, checkpoint: str, record: str) -> None:
        self.step = step
        self.checkpoint = checkpoint
        self.record = Path(record)
        self._digest = ""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Takes the digest before the model can change the batch."""
        self._digest = digest(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes a line of the record; ends the run if it is time."""
        if trainer.is_global_zero:
            loss = float(outputs["loss"]) if isinstance(outputs, dict) else None
            with self.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps([trainer.current_epoch, batch_idx, self._digest, loss]) + "\n")
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.checkpoint)
            raise SystemExit(0)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the checkpoint of a run that is over."""
        trainer.save_checkpoint(self.checkpoint)


def digest(batch: Any) -> str:
    """A digest of all tensors in nested mappings and sequences."""
    total = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            total.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict | list | tuple):
            for inner in part.values() if isinstance(part, dict) else part:
                add(inner)

    add(batch)
    return total.hexdigest()
