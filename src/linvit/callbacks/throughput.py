"""Images per second, in the progress bar and the logs."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Throughput(Callback):
    """Logs `images/s` of training over all devices, from the start of the first step to the end of the last one.

    Args:
        window: Steps that one figure spans.
    """

    def __init__(self, window: int = 10) -> None:
        self.window = window
        self._images = 0
        self._steps = 0
        self._since = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts anew: validation and start-up do not count."""
        self._restart()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts a batch and logs when the window is full."""
        self._images += len(batch["image"]) * trainer.world_size
        self._steps += 1
        if self._steps == self.window:
            rate = self._images / (time.perf_counter() - self._since)
            pl_module.log("images/s", rate, prog_bar=True, batch_size=len(batch["image"]))
            self._restart()

    def _restart(self) -> None:
        self._images = self._steps = 0
        self._since = time.perf_counter()
