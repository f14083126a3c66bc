"""Checks of numbers: finite weights, and errors of results."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

RUNNING_STATISTICS = ("running_mean", "running_var")  # names of the buffers of BatchNorm and its relatives


def is_running_statistic(name: str) -> bool:
    """Returns True if a buffer of this name follows the training data."""
    return name.rpartition(".")[2] in RUNNING_STATISTICS


def tensors(values: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors in nested mappings, lists and tuples."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield values
    elif isinstance(values, Mapping | list | tuple):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from tensors(value)


def is_finite(values: Any) -> bool:
    """Returns True if all numbers in nested containers are finite."""
    return not any(_true(_not_finite(values)))


def not_finite(model: nn.Module, checkpoint: Mapping[str, Any]) -> list[str]:
    """Returns the names of a checkpoint's non-finite weights (`state_dict`) of a model, and "optimizer_states" if so.

    Buffers other than running statistics may be infinite, such as masks of -inf, but not NaN.
    """
    masks = {name for name, _ in model.named_buffers() if not is_running_statistic(name)}
    state = checkpoint["state_dict"]
    own = [(value.isnan() if name in masks else value.isfinite().logical_not()).any() for name, value in state.items()]
    bad = _true([*own, *_not_finite(checkpoint.get("optimizer_states"))])
    names = [name for name, flag in zip(state, bad, strict=False) if flag]
    return names + ["optimizer_states"] * any(bad[len(state) :])


def relative_error(got: Tensor, want: Tensor) -> float:
    """Returns the largest absolute difference over the largest entry; NaN if one is NaN or shapes differ."""
    got, want = got.detach().double(), want.detach().double()
    if got.shape != want.shape:
        return math.nan
    if not want.numel():
        return 0.0
    return float((got - want).abs().max() / want.abs().max().clamp_min(torch.finfo(torch.float64).tiny))


def sortable(error: float) -> float:
    """Returns an error as a key for `max`, where NaN is larger than any number."""
    return math.inf if math.isnan(error) else error


def worst(errors: Iterable[float]) -> float:
    """Returns the largest error, or NaN if there is one."""
    return max(errors, key=sortable)


def _not_finite(values: Any) -> list[Tensor]:
    return [tensor.detach().isfinite().logical_not().any() for tensor in tensors(values)]


def _true(flags: Sequence[Tensor]) -> list[bool]:
    """Returns the values of scalars, with one synchronisation per device instead of one per scalar."""
    values = {
        device: iter(torch.stack([flag for flag in flags if flag.device == device]).tolist())
        for device in {flag.device for flag in flags}
    }
    return [next(values[flag.device]) for flag in flags]
