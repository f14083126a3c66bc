"""Mathematics that several mechanisms use, without parameters and in the precision of the inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.ops.precision import upcast
from linvit.attention.ops.products import matmul, side_by_side
from linvit.attention.ops.recompute import transformed


def linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float, mean: bool = False) -> Tensor:
    """Normalised linear attention `phi(q) (phi(k)^T v) / (phi(q) sum phi(k) + eps)` on given features.

    Katharopoulos et al. 2020, Eq. 5, in (M + N) d^2 multiplications instead of N M d.

    Args:
        q: Query features (B, h, N, dk).
        k: Key features (B, h, M, dk).
        v: Values (B, h, M, d).
        eps: Added to the denominator.
        mean: Use means over the keys instead of sums. The quotient is the same but for the weight of `eps`.

    Returns:
        (B, h, N, d).
    """
    if torch.compiler.is_compiling():  # which lays (B, h, N, d) out like images where convolutions follow
        heads = q.shape[:2]
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # (B h, N, d)
        out: Tensor = apply_key_sums(q, *key_sums(k, v, mean), eps).unflatten(0, heads)
        return out
    return apply_key_sums(q, *key_sums(k, v, mean), eps)


def key_sums(k: Tensor, v: Tensor, mean: bool = False) -> tuple[Tensor, Tensor]:
    """The sums of linear attention over keys (B, h, M, dk) and values (B, h, M, d).

    Returns:
        `sum_m k_m v_m^T` (B, h, dk, d) and `sum_m k_m` (B, h, dk, 1), or the means.
    """
    by_image = side_by_side(k) or side_by_side(v)
    if not by_image:
        k = k.contiguous()
    context, total = matmul(k.mT, v, by_image), k.sum(-2, keepdim=True).mT
    return (context / k.shape[-2], total / k.shape[-2]) if mean else (context, total)


def apply_key_sums(q: Tensor, context: Tensor, total: Tensor, eps: float) -> Tensor:
    """`q context / (q total + eps)` for query features (B, h, N, dk) and `key_sums`, (B, h, N, d)."""
    by_image = side_by_side(q)
    if not by_image:
        q = q.contiguous()
    out, weights = matmul(q, context, by_image), (matmul(q, total, by_image) + eps).reciprocal()
    return out * weights if weights.requires_grad else out.mul_(weights)


def linear_factors(q: Tensor, k: Tensor, eps: float, mean: bool = False) -> tuple[Tensor, Tensor]:
    """Factors (B, h, N, dk), (B, h, M, dk) of the matrix that `linear_attention` applies to v."""
    if mean:
        k = k / k.shape[-2]
    return q / (q @ k.sum(-2, keepdim=True).mT + eps), k


def channelwise_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Linear attention with as many heads as channels, `q * sum_m(k_m * v_m)` entry by entry; no denominator.

    Args:
        q: Query features (B, h, N, d).
        k: Key features (B, h, M, d).
        v: Values (B, h, M, d).

    Returns:
        (B, h, N, d), of rank 1 in every channel.
    """
    return q * (k * v).sum(-2, keepdim=True)


def channelwise_factors(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Factors (B, h, d, N, 1), (B, h, d, M, 1) of the matrices that `channelwise_attention` applies to v; views."""
    return q.mT.unsqueeze(-1), k.mT.unsqueeze(-1)


def unit(x: Tensor, eps: float, order: float = 2, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """Vectors brought to length one, `x / max(||x||, eps)`, with norms of the given order over `dims`.

    A vector of zeros stays zero at any eps and passes its gradient on unchanged; the quotient would divide it by eps.
    """
    return x / divisor(x, eps, order, dims)


def divisor(x: Tensor, eps: float, order: float = 2, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """What `unit` divides by, with `dims` kept at length 1: `max(||x||, eps)`, and 1 for a vector of zeros."""
    norm: Tensor = torch.linalg.vector_norm(x, order, dims, keepdim=True)
    return norm.clamp_min(eps).masked_fill(norm == 0, 1)


def focus(x: Tensor, factor: float) -> Tensor:
    """The focused function `f_p(x) = ||x|| x^p / ||x^p||` (FLatten, Eq. 5) with L2 norms over the last dimension.

    Keeps the norm and the order of the entries and sharpens the direction. Dividing by the largest entry first changes
    nothing (f_p is the same for x and c x up to the factor c) but keeps x^p from under- and overflowing at any p.

    Args:
        x: Non-negative features (..., C); overwritten unless they need a gradient.
        factor: The focusing factor p >= 1.
    """
    if x.requires_grad and not transformed(x):
        return _Focus.apply(x, factor)  # type: ignore[no-any-return]
    return _focused(x, factor, torch.div if x.requires_grad else torch.Tensor.div_)


def _focused(x: Tensor, factor: float, divide: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    tiny = torch.finfo(x.dtype).tiny
    # The largest power becomes 2^30, not 1: squares of small powers are then no denormal numbers, which are slow.
    unit = (x.detach().amax(-1, keepdim=True) * 2 ** (-30 / factor)).clamp_min(tiny)
    x = divide(x, unit)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True) * unit
    powered = x.pow(factor) if x.requires_grad else x.pow_(factor)
    scale: Tensor = norm / torch.linalg.vector_norm(powered, dim=-1, keepdim=True).clamp_min(tiny)
    return powered * scale if scale.requires_grad else powered.mul_(scale)


class _Focus(torch.autograd.Function):
    """`focus` with a gradient in half as many passes over memory as that of its operations takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """Keeps x and the result."""
        ctx.factor = factor
        focused = _focused(x, factor, torch.div)
        ctx.save_for_backward(x, focused)
        return focused

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """`p y/x (g - y (g y) / ||x||^2) + x (g y) / ||x||^2` for `y = f_p(x)`, of the same norm as x."""
        x, y = ctx.saved_tensors
        tiny = torch.finfo(x.dtype).tiny
        norm = length(x).clamp_min(tiny)
        along = (gradient * y).sum(-1, keepdim=True) / norm / norm
        across = torch.addcmul(gradient, y, -along)
        return torch.addcmul(x * along, y / x.clamp_min(tiny), across, value=ctx.factor), None


def focus_as_written(x: Tensor, factor: float) -> Tensor:
    """`focus` in the reference's order of operations, which gives NaN for p >= 8."""
    powered = x**factor
    focused: Tensor = powered / length(powered) * length(x)
    return focused


def length(x: Tensor) -> Tensor:
    """L2 norms over the last dimension, (..., C) -> (..., 1)."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm


def times(x: Tensor, factor: Tensor) -> Tensor:
    """`x * factor`, in place unless the backward pass needs x: a CPU allocates more slowly than it multiplies."""
    return x * factor if factor.requires_grad else x.mul_(factor)


def times_plus(x: Tensor, factor: Tensor, shift: Tensor) -> Tensor:
    """`x * factor + shift`, in place unless the backward pass needs x; see `times`."""
    if x.requires_grad or factor.requires_grad:
        return torch.addcmul(shift, x, factor)
    return x.mul_(factor).add_(shift)


def join_heads(x: Tensor) -> Tensor:
    """(B, h, N, d) -> (B, N, h d); a view of what `split_heads` gave."""
    joined: Tensor = x.transpose(1, 2).flatten(2)
    return joined


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, h d) -> (B, h, N, d); a view."""
    split: Tensor = x.unflatten(2, (num_heads, -1)).transpose(1, 2)
    return split


def same_size(old: Sequence[int], new: Sequence[int]) -> bool:
    """Whether a table for the size `old` serves `new` as it is; never in export, whose graph may be for any size."""
    return not torch.compiler.is_exporting() and tuple(old) == tuple(new)


def resize_tokens(tokens: Tensor, old: tuple[int, int], new: tuple[int, int], mode: str = "bicubic") -> Tensor:
    """A table of patch tokens (1, H*W, C) interpolated from one grid to another, "bicubic" or "bilinear"."""
    if not torch.compiler.is_exporting() and tuple(old) == tuple(new):
        return tokens
    grid = tokens.mT.unflatten(2, old)  # (1, C, H, W)
    resized = F.interpolate(upcast(grid), size=new, mode=mode, align_corners=False)
    return resized.to(tokens.dtype).flatten(2).mT  # (1, H'*W', C)
