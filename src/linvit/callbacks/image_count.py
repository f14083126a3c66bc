"""How many images an evaluation was over."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class ImageCount(Callback):
    """Counts the images of the last validation or test.

    Attributes:
        images: How many there were, over all devices.
    """

    def __init__(self) -> None:
        self.images = 0
        self._own = 0

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts at 0."""
        self._own = 0

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Counts a batch."""
        _, batch, *_ = args
        self._own += len(batch["image"])

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds up the counts of all devices."""
        own = torch.tensor(self._own, device=pl_module.device)
        self.images = int(trainer.strategy.reduce(own, reduce_op="sum"))

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]
    on_test_epoch_end = on_validation_epoch_end
