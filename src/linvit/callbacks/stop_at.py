"""Ends a run after some steps, and keeps a record of them: `linvit verify-resume` compares such runs."""

import hashlib
import json
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from linvit.signals import STOP


class StopAt(Callback):
    """Ends a run after an optimiser step, as SIGTERM does: `StopOnSignal` saves last.ckpt.

    Args:
        step: Optimiser steps.
        record: A file that gets a line for each batch: epoch, number, digest and loss, of the first rank.
    """

    def __init__(self, step: int, record: str) -> None:
        self.step = step
        self.record = Path(record)
        self._digest = ""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Takes the digest before the model can change the batch."""
        self._digest = digest(batch)

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        """Asks the run to end after this step."""
        if trainer.global_step == self.step - 1:
            STOP.agree(signal.SIGTERM)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Writes a line of the record."""
        outputs, _, batch_idx = args
        if trainer.is_global_zero:
            loss = float(outputs["loss"]) if isinstance(outputs, dict) else None
            with self.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps([trainer.current_epoch, batch_idx, self._digest, loss]) + "\n")


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
