"""Linear attention on given features: sums over the keys, and quotients of queries and these sums.

Features in bfloat16, as `mixed_precision` allows them, take few passes over the tokens, and sums and quotients are
float32. The values get a channel of minus ones there, so one product with the keys gives both sums, one with the
queries numerator and denominator; the gradient of each is one product as well. The gradients' terms of numerator and
denominator nearly cancel: added after rounding, they would lose a digit. On a GPU a layer of 56 x 56 tokens
moves 10 % fewer bytes so with `linear`, 13 % with `cosformer`; 9 and 6 % with `mala` and `mlla` (rotary.py), as
`tests/null_cuda/layers.py` counts them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from linvit.attention.grid import Grid
from linvit.attention.ops.decorators import supports_custom_autograd
from linvit.attention.ops.functional import is_exporting, product_in, upcast
from linvit.attention.packed import CHUNK, Packed

ALIGNED = 8
"""Channels added to values in bfloat16; two of them are used, because tensor cores need rows of 16 bytes."""


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float,
    mean: bool = False,
    least: bool = False,
    grid: Grid | Packed | None = None,
) -> Tensor:
    """Returns normalised linear attention `phi(q) (phi(k)^T v) / (phi(q) sum phi(k) + eps)` on given features.

    Katharopoulos et al. 2020, Eq. 5: (B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d).
    With means over the keys instead of sums the quotient is the same but for the weight of `eps`. Where `eps` is the
    `least` denominator, it is not added. Features may be wider than values in bfloat16.
    Features of `Packed` images, (1, h, T, dk), have the sums of each image.
    """
    if isinstance(grid, Packed):
        context, total = (grid.add_up(x) for x in key_sums(grid.cut(upcast(k)), grid.cut(upcast(v))))
        if mean:
            count = grid.add_up(grid.cut(total.new_ones(1, 1, grid.num_queries, 1)).sum(-2, keepdim=True))
            context, total = context / count, total / count
        return grid.uncut(apply_key_sums(grid.cut(upcast(q), zeros=False), context, total, eps, least)).to(v.dtype)
    if v.dtype == torch.bfloat16 and not torch.compiler.is_compiling() and supports_custom_autograd(q):
        return _LinearAttention.apply(q, k, v, eps * k.shape[-2] if mean else eps, least)  # type: ignore[no-any-return]
    if torch.compiler.is_compiling():  # which lays (B, h, N, d) out like images where convolutions follow
        heads = q.shape[:2]
        q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)  # (B h, N, d)
        out: Tensor = apply_key_sums(q, *key_sums(k, v, mean), eps, least).unflatten(0, heads)
        return out
    return apply_key_sums(q, *key_sums(k, v, mean), eps, least)


def key_sums(k: Tensor, v: Tensor, mean: bool = False) -> tuple[Tensor, Tensor]:
    """`sum_m k_m v_m^T` (B, h, dk, d) and `sum_m k_m` (B, h, dk, 1) of keys and values (B, h, M, d), or the means."""
    k = k.contiguous()
    context, total = k.mT @ v, k.sum(-2, keepdim=True).mT
    return (context / k.shape[-2], total / k.shape[-2]) if mean else (context, total)


def apply_key_sums(q: Tensor, context: Tensor, total: Tensor, eps: float, least: bool = False) -> Tensor:
    """`q context / (q total + eps)` for query features (B, h, N, dk) and `key_sums`, (B, h, N, d)."""
    q = q.contiguous()
    divisor = q @ total
    lost = eps < 1e-7 and is_exporting()  # torch's ONNX exporter adds nothing that is so near 0
    divisor = divisor.clamp_min(eps) if least or lost else divisor + eps
    return (q @ context) * divisor.reciprocal()


def key_product(q: Tensor, k: Tensor, v: Tensor, grid: Grid | Packed | None) -> Tensor:
    """`q (k^T v)`, (B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d); in a pack image by image."""
    if not isinstance(grid, Packed):
        return q @ (k.mT @ v)
    sums = grid.add_up(grid.cut(upcast(k)).mT @ grid.cut(upcast(v)))
    return grid.uncut(grid.cut(upcast(q)) @ sums).to(v.dtype)


def channelwise_attention(q: Tensor, k: Tensor, v: Tensor, grid: Grid | Packed, mean: bool = False) -> Tensor:
    """`q * sum_m(k_m * v_m)`, or the mean, entry by entry, (B, h, N, d): linear attention with a head per channel."""
    total = key_sum(k * v, grid)
    return q * (total / key_count(k, grid) if mean else total)


def key_sum(x: Tensor, grid: Grid | Packed, dtype: torch.dtype | None = None) -> Tensor:
    """Sum over the keys of (B, h, M, d), (B, h, 1, d); in a pack that of each token's image, (1, h, T, d)."""
    if not isinstance(grid, Packed):
        return x.sum(-2, keepdim=True, dtype=dtype)
    sums = grid.add_up(grid.cut(upcast(x)).sum(-2, keepdim=True))
    return grid.uncut(sums.expand(-1, -1, CHUNK, -1)).to(dtype or x.dtype)


def key_mix(weights: Tensor, v: Tensor, grid: Grid | Packed) -> Tensor:
    """Sum of v (B, h, M, d) over the keys with weights (B, h, M, 1), (B, h, 1, d); in a pack that of each image."""
    return key_sum(weights * v, grid) if isinstance(grid, Packed) else weights.mT @ v


def mean_product(q: Tensor, k: Tensor, grid: Grid | Packed) -> Tensor:
    """`q mean(k)` with the mean over the keys, (B, h, N, 1)."""
    if not isinstance(grid, Packed):
        return q @ k.mean(-2, keepdim=True).mT
    return key_product(q, k, torch.ones_like(k[..., :1]), grid) / grid.counts(k)


def key_max(x: Tensor, grid: Grid | Packed | None, dims: tuple[int, ...] = (-2,)) -> Tensor:
    """Largest entries over the keys of (B, h, M, d), or over `dims`, (B, h, 1, d); in a pack of each image."""
    if not isinstance(grid, Packed):
        return x.amax(dims, keepdim=True)
    return grid.map_images(lambda x, own: x.amax(dims, keepdim=True).expand(-1, -1, own.num_queries, -1), x)


def key_mean(x: Tensor, grid: Grid | Packed) -> Tensor:
    """Mean over the keys of (B, h, M, d), (B, h, 1, d); in a pack that of each token's image, (1, h, T, d)."""
    if not isinstance(grid, Packed):
        return x.mean(-2, keepdim=True)
    return (key_sum(upcast(x), grid) / key_count(upcast(x), grid)).to(x.dtype)


def key_count(x: Tensor, grid: Grid | Packed) -> Tensor | int:
    """Number of keys x (B, h, M, d); in a pack those of each token's image, (T, 1)."""
    return grid.counts(x) if isinstance(grid, Packed) else x.shape[-2]


def key_softmax(k: Tensor, grid: Grid | Packed | None) -> Tensor:
    """Softmax over the keys of (B, h, M, d); in a pack over those of each image."""
    return grid.map_images(lambda k, _: k.softmax(-2), k) if isinstance(grid, Packed) else k.softmax(-2)


def linear_factors(q: Tensor, k: Tensor, eps: float, mean: bool = False) -> tuple[Tensor, Tensor]:
    """Factors (B, h, N, dk), (B, h, M, dk) of the matrix that `linear_attention` applies to v."""
    if mean:
        k = k / k.shape[-2]
    return q / (q @ k.sum(-2, keepdim=True).mT + eps), k


class _LinearAttention(torch.autograd.Function):
    """`linear_attention` of bfloat16."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, eps: float, least: bool) -> Tensor:
        width = v.shape[-1]
        q, k = (x.to(v.dtype, memory_format=torch.contiguous_format).contiguous() for x in (q, k))
        v = torch.cat([v, v.new_full((1,), -1).expand(*v.shape[:-1], ALIGNED)], dim=-1)
        sums = k.mT @ v  # (B, h, dk, d + 8)
        quotient = product_in(torch.float32, q.flatten(0, 1), sums.flatten(0, 1)).unflatten(0, q.shape[:2])
        total = quotient[..., width : width + 1]  # (B, h, N, 1)
        divisor = total.neg().clamp_min_(eps) if least else eps - total
        ctx.least = eps if least else None
        out = torch.div(quotient[..., :width], divisor, out=like_tokens(q, width))
        ctx.save_for_backward(q, k, v, sums, divisor, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, sums, divisor, out = ctx.saved_tensors
        width = out.shape[-1]
        of_quotient = v.new_empty(*q.shape[:-1], width + ALIGNED)
        of_numerator, rest = of_quotient[..., :width], of_quotient[..., width:].zero_()
        torch.div(gradient, divisor, out=of_numerator)
        along = (of_numerator * out).sum(-1, keepdim=True, dtype=divisor.dtype)
        if ctx.least is not None:
            along = along * (divisor > ctx.least)
        torch.sub(along, rest[..., :1].copy_(along), out=rest[..., 1:2])  # what rounding left over
        of_sums = q.mT @ of_quotient
        return of_quotient @ sums.mT, v @ of_sums.mT, k @ of_sums[..., :width], None, None


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b` of (..., n, m) and (..., m, d), of bfloat16 in float32, so that sums over tokens are not rounded."""
    if a.dtype != torch.bfloat16 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return upcast(a) @ upcast(b)
    return product_in(torch.float32, a.flatten(0, -3), b.flatten(0, -3)).unflatten(0, a.shape[:-2])  # type: ignore[no-any-return]


def like_tokens(q: Tensor, width: int) -> Tensor:
    """Returns an empty (B, h, N, d) with the memory layout (B, N, h, d), so that joining its heads copies nothing."""
    batch, heads, tokens, _ = q.shape
    return q.new_empty(batch, tokens, heads, width).transpose(1, 2)
