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
    """Runs a method `(self, q, k, v, ...) -> o` in at least float32 with autocast off; `o` gets v's dtype back."""

    @functools.wraps(core)
    def run(self: Self, q: Tensor, k: Tensor, v: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        with nullcontext() if q.is_meta else torch.autocast(q.device.type, enabled=False):  # meta has no autocast
            return core(self, upcast(q), upcast(k), upcast(v), *args, **kwargs).to(v.dtype)

    return run
