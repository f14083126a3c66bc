"""Rank of every attention map while training: FLatten's Figure 5, live."""

from contextlib import ExitStack
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from linvit.analysis import entropy
from linvit.analysis.rank import (
    effective_rank_of,
    rank_of,
    rank_tolerance,
    singular_values,
    singular_values_of_product,
)
from linvit.analysis.recorder import Call, Recorder, mechanisms
from linvit.errors import UserError


class AttentionRank(Callback):
    """Logs `rank/`, `effective_rank/` and `entropy/` of each layer's equivalent matrix, averaged over the heads.

    Every `every_n_steps` optimiser steps the inputs of each mechanism for the first image of the batch are kept, and
    after the backward pass, before the optimiser changes the parameters, its matrix is probed in float64
    (`linvit.analysis.attention_matrix`). Where a mechanism offers thin factors, of one map or of one per channel, the
    ranks are those of the factors and take milliseconds at thousands of tokens. Linear attention stops at the head
    width; a depthwise convolution of the values lifts it to the number of tokens. Nothing here can end a run: a map
    with a non-finite entry is counted under `nonfinite/` instead.

    Args:
        every_n_steps: Optimiser steps between two measurements.
        channel: For mechanisms whose map differs per channel: the index of one (0 is the paper's figure), "mean" (the
            map averaged over channels), or "all" (min, mean and max over the channels).
        rtol: Relative tolerance of the rank; null is max(N, M) times the float64 epsilon.
        max_tokens: Of layers with more queries or keys no matrix is formed: its singular value decomposition takes
            seconds per head at 3,136 tokens. Their entropy is left out, and, without thin factors, their ranks.
    """

    def __init__(
        self,
        every_n_steps: int = 100,
        channel: int | Literal["mean", "all"] = 0,
        rtol: float | None = None,
        max_tokens: int = 1024,
    ) -> None:
        if every_n_steps < 1:
            raise UserError(f"every_n_steps must be at least 1; got {every_n_steps}")
        self.every_n_steps = every_n_steps
        self.channel = channel
        self.rtol = rtol
        self.max_tokens = max_tokens
        self._last_step = -1
        self._recorder: Recorder | None = None
        self._eager = ExitStack()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns if the model has no attention to measure."""
        if not mechanisms(pl_module):
            rank_zero_warn("AttentionRank: the model has no linvit attention, so no rank is logged")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Records the coming forward pass if a measurement is due."""
        step = trainer.global_step
        due = step % self.every_n_steps == 0 and step != self._last_step
        if trainer.is_global_zero and due and mechanisms(pl_module):
            self._last_step = step
            self._recorder = Recorder(pl_module)
            if pl_module.hparams.get("compile"):  # a compiled network does not see hooks: this one step runs without
                self._eager.enter_context(torch.compiler.set_stance("force_eager"))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Measures what was recorded, before the optimiser changes the parameters, and logs the results."""
        if self._recorder is None:
            return
        self._stop_recording()
        values: dict[str, float] = {}
        for layer, call in self._recorder.calls.items():
            try:
                values |= self._measure(layer.removeprefix("network.").removeprefix("backbone."), call)
            except Exception as error:  # a measurement must never end a run
                rank_zero_warn(f"AttentionRank: {layer} cannot be measured: {type(error).__name__}: {error}")
        self._recorder = None
        for logger in trainer.loggers:
            logger.log_metrics(values, step=self._last_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Removes the hooks."""
        self._stop_recording()

    def _stop_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
        self._eager.close()

    def _measure(self, layer: str, call: Call) -> dict[str, float]:
        tokens = max(call.grid.num_queries, call.grid.num_keys)
        factors = self._factors(call)
        if factors is None and tokens > self.max_tokens:
            rank_zero_warn(f"AttentionRank: {layer} has {tokens} tokens, over max_tokens={self.max_tokens}; left out")
            return {}
        matrix = None
        if factors is None:
            matrix = call.matrix()
            if call.mechanism.channelwise and self.channel != "all":
                matrix = matrix.mean(1) if self.channel == "mean" else matrix[:, self.channel]
            spectrum = singular_values(matrix)
        else:
            if tokens <= self.max_tokens:
                matrix = factors[0] @ factors[1].mT
            spectrum = singular_values_of_product(*factors)
        rtol = rank_tolerance(call.grid.num_queries, call.grid.num_keys) if self.rtol is None else self.rtol
        values: dict[str, float] = {}
        nonfinite = int(spectrum.isnan().any(-1).sum())
        if nonfinite:
            values[f"nonfinite/{layer}"] = nonfinite
        values |= self._tags(f"rank/{layer}", rank_of(spectrum, rtol))
        values |= self._tags(f"effective_rank/{layer}", effective_rank_of(spectrum))
        if matrix is not None:
            values |= self._tags(f"entropy/{layer}", entropy(matrix))
        return values

    def _factors(self, call: Call) -> tuple[Tensor, Tensor] | None:
        """The thin factors, if there are any, of the maps that `channel` selects: (h, N, r), or (h, d, N, r)."""
        factors = call.factors()
        if factors is None or not call.mechanism.channelwise or self.channel == "all":
            return factors
        if self.channel == "mean":  # the sum of the channels' products is the product of their columns side by side
            left, right = (factor.transpose(1, 2).flatten(2) for factor in factors)  # (h, N, d r), (h, M, d r)
            return left / call.mechanism.head_dim, right
        left, right = factors
        return left[:, self.channel], right[:, self.channel]

    def _tags(self, tag: str, per_map: Tensor) -> dict[str, float]:
        """Mean over the heads of (h,); for "all" channels (h, d), min, mean and max over heads and channels."""
        finite = per_map[per_map.isfinite()]
        if finite.numel() == 0:
            return {}
        if per_map.ndim == 1:
            return {tag: finite.mean().item()}
        return {
            f"{tag}/min": finite.min().item(),
            f"{tag}/mean": finite.mean().item(),
            f"{tag}/max": finite.max().item(),
        }
