"""Networks without the core of their attention, whose time no attention between the same projections can beat.

A core `o = f(q, k, v)` becomes a copy of v. The copy is an operator that torch cannot look into, so that compilers keep
the projections of q and k, and autograd their backward passes.
"""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts, Project

SDPA = F.scaled_dot_product_attention


@torch.library.custom_op("linvit::copy_of_values", mutates_args=())
def copy_of_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns a copy of v (B, h, M, d), laid out as torch's fused attention lays out its outputs: (B, M, h, d)."""
    return _copied(v)


def _copied(v: Tensor) -> Tensor:
    copied: Tensor = v.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return copied.transpose(1, 2)


@copy_of_values.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _copied(v)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k = ctx.saved_tensors
    return torch.zeros_like(q), torch.zeros_like(k), gradient


copy_of_values.register_autograd(_gradients, setup_context=_keep_inputs)


def values_for_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(B, h, N, dk), (B, h', M, dk), (B, h', M, d) -> (B, h, N, d): values, repeated where keys or heads are fewer."""
    out: Tensor = copy_of_values(q, k, v)
    if q.shape[1] != v.shape[1]:  # grouped queries
        out = out.repeat_interleave(q.shape[1] // v.shape[1], 1)
    if q.shape[2] != v.shape[2]:
        out = out.repeat(1, 1, -(-q.shape[2] // v.shape[2]), 1)[:, :, : q.shape[2]]
    return out


class Values(Attention):
    """Returns the values themselves, in place of a mixture of them.

    Args:
        project: Projections of the host, those of the mechanism that it is compared with.
    """

    facts = Facts(complexity="O(N)", linear_in_values=False, no_matrix="it mixes no tokens")
    precision = "inherit"
    recompute = False

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None, project: Project = "qkv"
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.declare(project=project)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        return values_for_queries(q, k, v)


class InterceptedAttention(TorchFunctionMode):
    """Counts calls of `F.scaled_dot_product_attention` within the block; with `replace` it takes their core out."""

    def __init__(self, replace: bool = True) -> None:
        super().__init__()
        self.replace, self.calls = replace, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is not F.multi_head_attention_forward:  # within which this mode is off
            return func(*args, **kwargs)
        with patch.object(F, "scaled_dot_product_attention", self._attention):
            return func(*args, **kwargs)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        if self.replace:
            return values_for_queries(query, key, value)
        return SDPA(query, key, value, *args, **kwargs)
