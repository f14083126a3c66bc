"""Images per second, and how much of the time went into waiting for them."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class Throughput(Callback):
    """Logs the speed of training, from the start of the first step to the end of the last one, validation left out.

    `images/s` counts all devices. `data_wait` is the fraction of the time in which training waits for its loader: near
    0, the model limits the speed; above about 0.1, the loader does; see `data.num_workers`. It is that of linvit's own
    loaders, or of others that count their `seconds_waited`.

    Args:
        window: Steps that one figure spans. An epoch that has fewer, or fewer than loggers skip between two figures
            (`trainer.log_every_n_steps`), gets one at its end.
    """

    def __init__(self, window: int = 10) -> None:
        self.window = window
        self._latest: dict[str, float] = {}
        self._since = self._ended = 0.0  # a validation comes before training, too

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock: a run that is resumed within an epoch does not start one."""
        self._restart(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restarts the clock: validation and start-up do not count."""
        self._latest = {}
        self._restart(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._paused = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock again: a validation within the epoch does not count either."""
        pause = time.perf_counter() - self._paused
        self._since += pause
        self._ended += pause

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Counts a batch and logs when the window is full."""
        _, batch, *_ = args
        self._ended = time.perf_counter()
        self._images += len(batch["image"]) * trainer.world_size
        self._steps += 1
        if self._steps == self.window:
            self._latest = self._figures(trainer)
            self._log(pl_module, batch_size=len(batch["image"]))
            self._restart(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the figures of a short epoch."""
        if not self._latest and self._steps:
            self._latest = self._figures(trainer)
        elif trainer.num_training_batches >= trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        self._log(pl_module, sync_dist=True)

    def _figures(self, trainer: Trainer) -> dict[str, float]:
        passed, waited = self._ended - self._since, _seconds_waited(trainer)
        wait = {} if waited is None or self._waited is None else {"data_wait": (waited - self._waited) / passed}
        return {"images/s": self._images / passed, **wait}

    def _log(self, pl_module: LightningModule, **options: Any) -> None:
        for name, figure in self._latest.items():
            pl_module.log(name, figure, prog_bar=name == "images/s", **options)

    def _restart(self, trainer: Trainer) -> None:
        self._images = self._steps = 0
        self._waited = _seconds_waited(trainer)
        self._since = self._ended = time.perf_counter()


def _seconds_waited(trainer: Trainer) -> float | None:
    return getattr(trainer.train_dataloader, "seconds_waited", None)
