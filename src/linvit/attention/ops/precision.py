"""Numerically delicate mathematics runs in at least float32, whatever the precision around it."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

Self = TypeVar("Self")
P = ParamSpec("P")


def upcast(x: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 stay what they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def full_precision(
    core: Callable[Concatenate[Self, Tensor, Tensor, Tensor, P], Tensor],
) -> Callable[Concatenate[Self, Tensor, Tensor, Tensor, P], Tensor]:
    """Decorates a method `(self, q, k, v, ...) -> o`, such as `forward`, to run in at least float32 with autocast off.

    Half precision has too few digits for sums over many tokens and for quotients, and float16 ends at 65504. q, k and v
    of any shape are cast up, and `o` gets v's dtype back; float32 and float64 stay what they are. Further arguments and
    parameters of the module are not cast: write `self.scale.to(q.dtype)`.

    Example:
        >>> class Cosine(linvit.Attention):
        ...     @linvit.full_precision
        ...     def forward(self, q, k, v, grid): ...
    """

    @functools.wraps(core)
    def run(self: Self, q: Tensor, k: Tensor, v: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        with nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False):  # meta has no autocast
            return core(self, upcast(q), upcast(k), upcast(v), *args, **kwargs).to(v.dtype)

    return run
