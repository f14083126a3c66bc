"""Measures attention during training, on fixed images; ranks of every attention matrix, as in FLatten's Figure 5."""

import time
from pathlib import Path
from statistics import median
from typing import Any, Literal, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor

from linvit.analysis.attention_matrix import CHANNELS
from linvit.analysis.attention_statistics import layer_statistics
from linvit.analysis.recorder import Call, observable, observe
from linvit.errors import UserError, check_number

SECONDS = 10.0  # after which a measurement ends
TRIAL = 100  # steps whose speed sets the interval of measurements, if `every_n_steps` does not
INTERVALS = [100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000]


class Measurement(Callback):
    """Base class of periodic measurements of a run's attention, on images that stay the same.

    It measures before the step, on a copy of the network in evaluation mode that shares the weights, on rank 0. A
    warning lists failed measurements.
    """

    def __init__(self, every_n_steps: int | None, images: int, max_share: float | None) -> None:
        if every_n_steps is not None:
            check_number("every_n_steps", every_n_steps, at_least=1, whole=True)
        check_number("images", images, at_least=1, whole=True)
        if max_share is not None:
            check_number("max_share", max_share, above=0, note=", such as 0.01 for 1 %, or null for no limit")
        self.every_n_steps = every_n_steps
        self.images = images
        self.max_share = max_share
        self.folder: Path | None = None
        self.seconds = 0.0
        self.cost: float | None = None  # seconds of one measurement of all layers
        self.interval: int | None = None  # steps between two measurements, if `every_n_steps` is not given
        self._begun, self._first_step = 0.0, 0
        self._last_step = -1
        self._supported = False
        self._samples: Tensor | None = None

    def measure(self, trainer: Trainer, calls: list[dict[str, Call]], until: float) -> None:
        """Measures the layers' inputs, for each image by name, until `time.monotonic()` is `until`."""
        raise NotImplementedError

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns about layers that cannot be measured; chooses the images."""
        self._begun, self.seconds, self._last_step, self._samples = time.monotonic(), 0.0, -1, None
        self._first_step = trainer.global_step
        folder = trainer.log_dir  # all ranks take part, since it is that of rank 0
        self.folder = None if folder is None else Path(folder)
        self._supported = False
        if not trainer.is_global_zero:
            return
        try:
            if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
                raise UserError(f"no rank has the whole weights under {type(trainer.strategy).__name__}")
            observable(cast("Any", pl_module).network, getattr(getattr(trainer, "datamodule", None), "size", 224))
            self._supported = True
        except (UserError, AttributeError) as error:  # also of a task without a `network`
            self.say(f"{type(self).__name__}: the model has no attention that can be measured: {error}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measures if a measurement is due."""
        step = trainer.global_step
        if not self._supported or step == self._last_step or not self._is_due(step):
            return
        self._last_step = step
        started = time.monotonic()
        share = SECONDS
        if self.every_n_steps is not None and self.max_share is not None:
            share = self.max_share * (started - self._begun) - self.seconds
        if share < 0:  # earlier ones have taken more than their share
            return
        try:
            self.measure(trainer, self._calls(trainer, pl_module, batch), started + min(SECONDS, share))
        except Exception as error:  # a measurement must never end a run
            rank_zero_warn(f"{type(self).__name__}: step {step} cannot be measured: {type(error).__name__}: {error}")
        self.seconds += time.monotonic() - started

    def state_dict(self) -> dict[str, Any]:
        """Returns cost and interval of measurements, so that a resumed run measures at the same steps."""
        return {} if self.every_n_steps is not None else {"cost": self.cost, "interval": self.interval}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores both."""
        self.cost, self.interval = state_dict.get("cost"), state_dict.get("interval")

    def say(self, text: str) -> None:
        """Warns that something cannot be measured; only informs if the user did not ask for measurements."""
        (rank_zero_info if self.every_n_steps is None else rank_zero_warn)(text)

    def _is_due(self, step: int) -> bool:
        """Returns True if a measurement is due before a step: the first one, then as often as `max_share` allows."""
        if self.every_n_steps is not None:
            return step % self.every_n_steps == 0
        if step % TRIAL:
            return False
        if self.cost is None:
            return True
        if self.interval is None and step > self._first_step:
            speed = (time.monotonic() - self._begun - self.seconds) / (step - self._first_step)  # seconds per step
            steps = self.cost / (speed * (self.max_share or 1))
            # Few possible values, so that two runs of one configuration measure at the same steps.
            self.interval = next((n for n in INTERVALS if n >= steps), INTERVALS[-1])
        return self.interval is not None and step % self.interval == 0

    def _calls(self, trainer: Trainer, task: Any, batch: Any) -> list[dict[str, Call]]:
        """Returns the layers' inputs for each image; images are of the first batch if the data has no preview."""
        data: Any = getattr(trainer, "datamodule", None)
        if self._samples is None and hasattr(data, "preview"):
            with isolate_rng():
                shown: Tensor = data.preview(self.images)["val"]
            mean, std = torch.tensor([data.mean, data.std]).view(2, -1, 1, 1)
            self._samples = (shown - mean) / std
        elif self._samples is None:
            first: Tensor = batch["image"] if isinstance(batch, dict) else batch[0]
            self._samples = first[: self.images].detach().clone()
        precision = trainer.precision_plugin
        with isolate_rng(), precision.forward_context():
            images = precision.convert_input(self._samples.to(task.device))
            return [observe(task.network, image) for image in images.split(1)]


CURVES = ("rank", "effective_rank", "entropy")


class AttentionRank(Measurement):
    """Logs `rank/`, `effective_rank/` and `entropy/` of each layer's equivalent matrix, averaged over the heads.

    The matrices are those of fixed images. If a mechanism has thin factors, of one map or of one per channel, the
    ranks are those of the factors and take milliseconds at thousands of tokens; otherwise the matrix is probed in
    float64. Linear attention stops at the head width; a depthwise convolution of the values lifts it to the number of
    tokens, so the ranks of both parts are also logged (`rank/LAYER/kernel`, `rank/LAYER/convolution`). A map with a
    non-finite entry is counted under `nonfinite/` instead. For a mechanism that mixes channels, not tokens (xca), only
    the rank of its matrix over the channels is logged, as `rank/LAYER/channels`.

    `linvit analyze` has all of `linvit.analysis.attention_statistics`, per head and part.

    The attention of timm models is also measured, if it can be replaced.

    Every run of `linvit fit` has it (`--attention_rank=false` disables it); one in `trainer.callbacks` replaces
    it.

    Args:
        every_n_steps: Optimiser steps between two measurements. null measures before the first step, and then every
            100, 300, 1000, ... steps, as often as `max_share` allows by the speed of the first 100.
        channel: For mechanisms whose map differs per channel: the index of one (0 is the paper's figure), or "mean"
            (the map averaged over channels).
        max_tokens: Layers with more queries or keys and without thin factors are not measured: the singular value
            decomposition of their matrix takes seconds per head at 3,136 tokens.
        images: Images, spread evenly over the validation set, over which the values are averaged.
        max_share: Maximum fraction of the training time for measurements. With `every_n_steps` each ends when it is
            used up, but not before one layer is done, and while they have taken more, the next ones are skipped; the
            remaining layers come first in the next one. null for no limit.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        channel: int | Literal["mean"] = 0,
        max_tokens: int = 1024,
        images: int = 1,
        max_share: float | None = 0.01,
    ) -> None:
        super().__init__(every_n_steps, images, max_share)
        self.channel = channel
        self.max_tokens = max_tokens
        self._next = 0
        self._left_out: dict[str, int] = {}  # tokens of layers that have too many

    def measure(self, trainer: Trainer, calls: list[dict[str, Call]], until: float) -> None:
        """Measures the layers in turn, the first one where the last measurement ended."""
        layers = list(calls[0])
        curves: dict[str, float] = {}
        known, times = len(self._left_out), []
        begin = self._next % len(layers)
        for count, layer in enumerate([*layers[begin:], *layers[:begin]]):
            if count and time.monotonic() > until:
                break
            self._next = begin + count + 1
            started = time.monotonic()
            try:
                found = self._layer(layer, [of_image[layer] for of_image in calls])
            except Exception as error:
                rank_zero_warn(f"{type(self).__name__}: {layer} cannot be measured: {type(error).__name__}: {error}")
                continue
            for part, numbers in found.items():
                curves |= self._curves(layer, part, numbers)
            times.append(time.monotonic() - started)
        self.cost = min(SECONDS, len(layers) * median(times or [0.0]))  # without one-time costs of the first call
        if new := [*self._left_out.items()][known:]:
            more = f", and {len(new) - 1} more layers" if len(new) > 1 else ""
            (layer, tokens), limit = new[0], self.max_tokens
            self.say(f"AttentionRank: {layer} has {tokens} tokens, over max_tokens={limit}; left out{more}")
        for logger in trainer.loggers:
            logger.log_metrics(curves, step=trainer.global_step)

    def _layer(self, layer: str, calls: list[Call]) -> dict[str, dict[str, Tensor]]:
        """Returns the statistics of a layer's parts, (images, h) each."""
        found = layer_statistics(calls, channel=self.channel, max_tokens=self.max_tokens)
        if not found.keys() & {"", CHANNELS}:
            self._left_out[layer] = max(calls[0].grid.num_queries, calls[0].grid.num_keys)
        return found

    def _curves(self, layer: str, part: str, numbers: dict[str, Tensor]) -> dict[str, float]:
        """Returns the curves of a layer or of its part."""
        named = {f"rank/{layer}/{part}": numbers["rank"]} if part else {}
        named = named or {f"{name}/{layer}": numbers[name] for name in CURVES}
        finite = {tag: values[values.isfinite()] for tag, values in named.items()}
        curves = {tag: values.mean().item() for tag, values in finite.items() if len(values)}
        if not part and (nonfinite := int(numbers["rank"].isnan().sum())):
            curves[f"nonfinite/{layer}"] = nonfinite
        return curves
