"""Monitors of a run: images, speed, memory, gradients, skipped and counted steps."""

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torchvision.utils import make_grid

from linvit.callbacks.common import rgb, writers
from linvit.io import machine

GIB = 2**30


class ProgressBar(TQDMProgressBar):
    """Lightning's bar, redrawn every 20 steps, with loss and speed, which it reads from the device only then.

    Lightning reads values logged with `prog_bar=True` in every step, which synchronises with the GPU. So `on_bar` is
    False where this bar is used.
    """

    def __init__(self, refresh_rate: int = 20) -> None:
        super().__init__(refresh_rate)

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        """Returns the metrics of Lightning's bar, and the latest loss and images/s."""
        latest = {name: trainer.callback_metrics.get(name) for name in ("train/loss", "images/s")}
        return super().get_metrics(trainer, pl_module) | {name: x.item() for name, x in latest.items() if x is not None}


def on_bar(trainer: Trainer) -> bool:
    """Returns True if metrics for the progress bar need `prog_bar=True`, for other bars than linvit's."""
    return not isinstance(trainer.progress_bar_callback, ProgressBar)


class Throughput(Callback):
    """Logs the speed of training, from the start of the first step to the end of the last one, without validation.

    `images/s` counts all devices. `data_wait` is the fraction of the time in which training waits for its loader: near
    0, the model limits the speed; above about 0.1, the loader does; see `data.num_workers`. It is measured for linvit's
    loaders, and for others that count their `seconds_waited`.

    Args:
        window: Number of steps per value. An epoch with fewer, or with fewer than loggers skip between two values
            (`trainer.log_every_n_steps`), gets one at its end.
    """

    def __init__(self, window: int = 10) -> None:
        self.window = window
        self._latest: dict[str, float] = {}
        self._since = self._ended = 0.0  # a validation also comes before training

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock, also in a run that is resumed within an epoch: validation and start-up do not count."""
        self._latest = {}
        self._restart(trainer)

    on_train_epoch_start = on_train_start

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
        """Logs the values of a short epoch."""
        if not self._latest and self._steps:
            self._latest = self._figures(trainer)
        elif trainer.num_training_batches >= trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        self._log(pl_module, sync_dist=True)

    def _figures(self, trainer: Trainer) -> dict[str, float]:
        passed, waited = self._ended - self._since, getattr(trainer.train_dataloader, "seconds_waited", None)
        wait = {} if waited is None or self._waited is None else {"data_wait": (waited - self._waited) / passed}
        return {"images/s": self._images / passed, **wait}

    def _log(self, pl_module: LightningModule, **options: Any) -> None:
        for name, figure in self._latest.items():
            pl_module.log(name, figure, prog_bar=name == "images/s" and on_bar(pl_module.trainer), **options)

    def _restart(self, trainer: Trainer) -> None:
        self._images = self._steps = 0
        self._waited = getattr(trainer.train_dataloader, "seconds_waited", None)
        self._since = self._ended = time.perf_counter()


class Memory(Callback):
    """Logs the peak memory of the first process, in GiB.

    `memory/host` is the largest resident set of the process itself, without its loader processes: a curve that never
    stops rising is a leak. Not available on Windows. `memory/device` is torch's allocation on the CUDA device.
    """

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Reads the values, in steps that are logged (`trainer.log_every_n_steps`)."""
        if trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        if (most := machine.largest_resident_set()) is not None:
            pl_module.log("memory/host", most / GIB)
        if pl_module.device.type == "cuda":
            pl_module.log("memory/device", torch.cuda.max_memory_allocated(pl_module.device) / GIB)


class LearningRates(Callback):
    """Logs the learning rate as `lr`, in steps that are logged.

    Where groups of parameters have different learning rates, `lr` is the largest, and `lr/x0.1` that of the groups
    that begin at a tenth of it. Lightning's `LearningRateMonitor` moves them to the device, which synchronises.
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Logs the learning rates of the next step."""
        for optimizer in trainer.optimizers if is_logged(trainer) else []:
            peaks = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
            rates = {peak: float(group["lr"]) for peak, group in zip(peaks, optimizer.param_groups, strict=True)}
            for peak, rate in rates.items():
                pl_module.log("lr" if peak == max(peaks) else f"lr/x{peak / max(peaks):.3g}", rate)


def is_logged(trainer: Trainer) -> bool:
    """True if the loggers write the current step."""
    return (trainer.global_step + 1) % trainer.log_every_n_steps == 0  # type: ignore[attr-defined, no-any-return]


class GradientNorm(Callback):
    """Logs `grad_norm`, the L2 norm over all parameters, as the optimiser gets it: unscaled, accumulated, not clipped.

    It is computed only in steps that are logged (`trainer.log_every_n_steps`), and not if the strategy shards the
    model, since each device then holds a part of the gradient.
    """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Logs the norm, after the backward pass and before clipping."""
        if is_logged(trainer) and not isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            gradients = [weight.grad for weight in pl_module.parameters() if weight.grad is not None]
            pl_module.log("grad_norm", get_total_norm(gradients))


class BadImageCount(Callback):
    """Warns after each training epoch in which more bad images were skipped, with the file that lists them."""

    def __init__(self) -> None:
        self._before = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns about the bad images of all devices."""
        bad = getattr(getattr(trainer, "datamodule", None), "bad_images", None)
        if bad is None or not trainer.is_global_zero or (skipped := len(bad.named())) == self._before:
            return
        self._before = skipped
        named = f"; they are named in '{bad.report}'" if bad.report else ""
        rank_zero_warn(
            f"epoch {trainer.current_epoch}: {skipped} training images could not be decoded so far, and others took "
            f"their place{named}"
        )


class ImageCount(Callback):
    """Counts the images of the last validation or test."""

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


class ImageGrid(Callback):
    """Writes one grid of transformed images per split at the start of a run, and leaves the random state unchanged.

    The images are those of the data module's `preview`; without such a method, nothing is written.

    Args:
        images: Images per grid.
    """

    def __init__(self, images: int = 32) -> None:
        self.images = images

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the first images of the training and the validation split, spread evenly."""
        preview = getattr(getattr(trainer, "datamodule", None), "preview", None)
        if not trainer.is_global_zero or not writers(trainer) or preview is None:
            return
        with isolate_rng():
            shown = preview(self.images)
        for name, images in shown.items():
            for writer in writers(trainer):
                writer.add_image(f"transforms/{name}", make_grid(rgb(images)), trainer.global_step)
