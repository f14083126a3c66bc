"""Rank of every attention matrix while training: FLatten's Figure 5, live."""

import time
from typing import Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from linvit.analysis.attention_matrix import CHANNELS
from linvit.analysis.attention_statistics import layer_statistics
from linvit.analysis.recorder import Call
from linvit.callbacks.attention.measurement import Measurement

CURVES = ("rank", "effective_rank", "entropy")


class AttentionRank(Measurement):
    """Logs `rank/`, `effective_rank/` and `entropy/` of each layer's equivalent matrix, averaged over the heads.

    The matrices are those of fixed images. Where a mechanism offers thin factors, of one map or of one per channel, the
    ranks are those of the factors and take milliseconds at thousands of tokens; otherwise the matrix is probed in
    float64. Linear attention stops at the head width; a depthwise convolution of the values lifts it to the number of
    tokens, so the ranks of both parts are logged, too (`rank/LAYER/kernel`, `rank/LAYER/convolution`). A map with a
    non-finite entry is counted under `nonfinite/` instead. Of a mechanism that mixes channels and no tokens (xca), the
    rank of its matrix over the channels is logged as `rank/LAYER/channels`, and nothing else.

    `linvit analyze` has all of `linvit.analysis.attention_statistics`, per head and part.

    The attention of timm models is measured, too, of those in which it can be replaced.

    Args:
        every_n_steps: Optimiser steps between two measurements.
        channel: For mechanisms whose map differs per channel: the index of one (0 is the paper's figure), or "mean"
            (the map averaged over channels).
        max_tokens: Of layers with more queries or keys and without thin factors nothing is measured: the singular value
            decomposition of their matrix takes seconds per head at 3,136 tokens.
        images: Images, spread evenly over the validation set, over which the values are averaged.
        max_share: Fraction of the training time that measurements may take: each ends when it is used up, but not
            before one layer is done, and while they have taken more, the next ones are left out; the layers that are
            left come first in the next one. null for no limit.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        channel: int | Literal["mean"] = 0,
        max_tokens: int = 1024,
        images: int = 1,
        max_share: float | None = 0.01,
    ) -> None:
        super().__init__(every_n_steps, images, max_share)
        self.channel = channel
        self.max_tokens = max_tokens
        self._next = 0

    def measure(self, trainer: Trainer, calls: list[dict[str, Call]], until: float) -> None:
        """Measures the layers in turn, the first one where the last measurement ended."""
        layers = list(calls[0])
        curves: dict[str, float] = {}
        begin = self._next % len(layers)
        for count, layer in enumerate([*layers[begin:], *layers[:begin]]):
            if count and time.monotonic() > until:
                break
            self._next = begin + count + 1
            try:
                found = self._layer(layer, [of_image[layer] for of_image in calls])
            except Exception as error:
                rank_zero_warn(f"{self.name}: {layer} cannot be measured: {type(error).__name__}: {error}")
                continue
            for part, numbers in found.items():
                curves |= self._curves(layer, part, numbers)
        for logger in trainer.loggers:
            logger.log_metrics(curves, step=trainer.global_step)

    def _layer(self, layer: str, calls: list[Call]) -> dict[str, dict[str, Tensor]]:
        """The statistics of a layer's parts, (images, h) each."""
        found = layer_statistics(calls, channel=self.channel, max_tokens=self.max_tokens)
        if not found.keys() & {"", CHANNELS}:
            tokens = max(calls[0].grid.num_queries, calls[0].grid.num_keys)
            rank_zero_warn(f"AttentionRank: {layer} has {tokens} tokens, over max_tokens={self.max_tokens}; left out")
        return found

    def _curves(self, layer: str, part: str, numbers: dict[str, Tensor]) -> dict[str, float]:
        """What is logged of a layer or of its part."""
        named = {f"rank/{layer}/{part}": numbers["rank"]} if part else {}
        named = named or {f"{name}/{layer}": numbers[name] for name in CURVES}
        finite = {tag: values[values.isfinite()] for tag, values in named.items()}
        curves = {tag: values.mean().item() for tag, values in finite.items() if len(values)}
        if not part and (nonfinite := int(numbers["rank"].isnan().sum())):
            curves[f"nonfinite/{layer}"] = nonfinite
        return curves
