"""Images per second, and how much of the time went into waiting for them."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Throughput(Callback):
    """Logs the speed of training, from the start of the first step to the end of the last one, validation left out.

    `images/s` counts all devices. `data_wait` is the share of the time between the end of one step and the start of
    the next: while it is near 0 the model sets the pace, and above about 0.1 the loader does; see `data.num_workers`.

    Args:
        window: Steps that one figure spans.
    """

    def __init__(self, window: int = 10) -> None:
        self.window = window
        self._restart()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts anew: validation and start-up do not count."""
        self._restart()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts anew: a validation amid the epoch does not count either."""
        self._restart()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Counts the time since the last step."""
        self._waited += time.perf_counter() - self._ended

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts a batch and logs when the window is full."""
        self._ended = time.perf_counter()
        self._images += len(batch["image"]) * trainer.world_size
        self._steps += 1
        if self._steps == self.window:
            passed = self._ended - self._since
            pl_module.log("images/s", self._images / passed, prog_bar=True, batch_size=len(batch["image"]))
            pl_module.log("data_wait", self._waited / passed, batch_size=len(batch["image"]))
            self._restart()

    def _restart(self) -> None:
        self._images = self._steps = 0
        self._waited = 0.0
        self._since = self._ended = time.perf_counter()
