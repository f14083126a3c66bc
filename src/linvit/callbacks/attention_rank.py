"""Rank of every attention map while training: FLatten's Figure 5, live."""

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from linvit.analysis import attention_matrix, entropy
from linvit.analysis.rank import effective_rank_of, rank_of, rank_tolerance, singular_values
from linvit.attention.base import Attention, Grid
from linvit.errors import UserError


class AttentionRank(Callback):
    """Logs `rank/`, `effective_rank/` and `entropy/` of each layer's equivalent matrix, averaged over the heads.

    Every `every_n_steps` optimiser steps the inputs of each mechanism for the first image of the batch are kept, and
    after the step its matrix is probed in float64 (`linvit.analysis.attention_matrix`). Linear attention stops at the
    head width; a depthwise convolution of the values lifts it to the number of tokens. Nothing here can end a run: a
    map with a non-finite entry is counted under `nonfinite/` instead.

    Args:
        every_n_steps: Optimiser steps between two looks.
        channel: For mechanisms whose map differs per channel: the index of one (0 is the paper's figure), "mean" (the
            map averaged over channels), or "all" (min, mean and max over the channels).
        rtol: Relative tolerance of the rank; null is max(N, M) times the float64 epsilon.
        max_tokens: Layers with more queries or keys are left out: a dense singular value decomposition of 3,136 tokens
            takes seconds per head.
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
        self._calls: dict[str, tuple[Attention, dict[str, Any]]] = {}
        self._hooks: list[RemovableHandle] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Says once what cannot be looked at."""
        if not any(isinstance(module, Attention) for module in pl_module.modules()):
            rank_zero_warn("AttentionRank: the model has no linvit attention, so no rank is logged")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Listens in on the coming forward pass if a look is due."""
        step = trainer.global_step
        if not trainer.is_global_zero or step % self.every_n_steps or step == self._last_step:
            return
        self._last_step = step
        for name, module in pl_module.named_modules():
            if isinstance(module, Attention):
                layer = name.removeprefix("backbone.").removesuffix(".mechanism")
                self._hooks.append(module.register_forward_pre_hook(self._listener(layer), with_kwargs=True))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs what was heard."""
        self._forget_hooks()
        values: dict[str, float] = {}
        for layer, (mechanism, call) in self._calls.items():
            values |= self._measure(layer, mechanism, call)
        self._calls.clear()
        if values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=self._last_step)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves no hook behind."""
        self._forget_hooks()

    def _forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _listener(self, layer: str) -> Callable[[Attention, tuple[Any, ...], dict[str, Any]], None]:
        def listen(mechanism: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = dict(zip(("q", "k", "v", "grid"), args, strict=False)) | kwargs
            self._calls[layer] = (mechanism, {name: _first(value) for name, value in call.items()})

        return listen

    def _measure(self, layer: str, mechanism: Attention, call: dict[str, Any]) -> dict[str, float]:
        grid: Grid = call["grid"]
        if max(grid.num_queries, grid.num_keys) > self.max_tokens:
            rank_zero_warn(
                f"AttentionRank: {layer} has {grid.num_queries} tokens, more than max_tokens={self.max_tokens}; left out"
            )
            return {}
        values = None if mechanism.probeable else call["v"]
        extra = {name: call[name] for name in ("bias", "x") if call.get(name) is not None}
        matrix = attention_matrix(mechanism, call["q"], call["k"], grid, v=values, **extra)[0]  # (h[, d], N, M)
        if mechanism.channelwise and self.channel != "all":
            matrix = matrix.mean(1) if self.channel == "mean" else matrix[:, self.channel]
        spectrum = singular_values(matrix)
        rtol = rank_tolerance(matrix) if self.rtol is None else self.rtol
        measured = {
            "rank": rank_of(spectrum, rtol),
            "effective_rank": effective_rank_of(spectrum),
            "entropy": entropy(matrix),
        }
        values_by_tag: dict[str, float] = {}
        nonfinite = int(spectrum.isnan().any(-1).sum())
        if nonfinite:
            values_by_tag[f"nonfinite/{layer}"] = nonfinite
        for quantity, per_map in measured.items():
            values_by_tag |= self._tags(f"{quantity}/{layer}", per_map)
        return values_by_tag

    def _tags(self, tag: str, per_map: Tensor) -> dict[str, float]:
        """Mean over the heads of (h,); for "all" channels (h, d), min, mean and max over heads and channels."""
        finite = per_map[per_map.isfinite()]
        if finite.numel() == 0:
            return {}
        if per_map.ndim == 1:
            return {tag: finite.mean().item()}
        return {f"{tag}/min": finite.min().item(), f"{tag}/mean": finite.mean().item(), f"{tag}/max": finite.max().item()}


def _first(value: Any) -> Any:
    """The first image's share of a tensor; anything else as it is."""
    return value[:1].detach().clone() if isinstance(value, Tensor) else value
