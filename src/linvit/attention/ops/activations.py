"""Feature maps entry by entry, whose gradients are products of floats where the choice by a mask would be slow.

Compiled code keeps masks of booleans for backward; on a CPU inductor's loops write them 30 times and read them 8 times
as slowly as floats (torch 2.15: 13 and 4 ms for 1.2 million, which `relu` itself takes 0.4 ms for).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.ops.recompute import takes_function


def relu(x: Tensor) -> Tensor:
    """`max(x, 0)`, of which compiled code for a CPU keeps the result for backward."""
    if x.device.type == "cpu" and torch.compiler.is_compiling() and takes_function(x):
        return _Relu.apply(x)  # type: ignore[no-any-return]
    return F.relu(x)


def elu_plus_one(x: Tensor) -> Tensor:
    """`elu(x) + 1` as `exp(x)` below 0, of which the sum of float32 numbers near -1 and 1 leaves no digit below -16."""
    if not torch.is_grad_enabled():
        return F.relu(x).add_(x.clamp_max(0).exp_())
    if takes_function(x):
        return _EluPlusOne.apply(x)  # type: ignore[no-any-return]
    return F.relu(x) + x.clamp_max(0).exp()  # the derivative at 0 is that of the second term, 1


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
"""Feature maps by name."""


def by_sign(sizes: Tensor, x: Tensor) -> Tensor:
    """Sizes of the entries of x, (..., d), in the first half of (..., 2 d) where x is positive, else in the second."""
    first = sizes * F.relu(x.detach().sign())  # products: several times as fast as masks on a CPU
    return torch.cat([first, sizes - first], dim=-1)


class _Relu(torch.autograd.Function):
    """`relu` whose gradient has the sign of the result as a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Keeps the result."""
        y = F.relu(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """`g sign(y)`."""
        (y,) = ctx.saved_tensors
        return gradient * y.sign()  # type: ignore[no-any-return]


class _EluPlusOne(torch.autograd.Function):
    """`elu_plus_one` whose derivative is read from the result: `min(y, 1)`, in a third of the passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Keeps the result."""
        y = F.relu(x).add_(x.clamp_max(0).exp_())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """`g min(y, 1)`."""
        (y,) = ctx.saved_tensors
        return gradient * y.clamp_max(1)  # type: ignore[no-any-return]
