"""Mathematics that several mechanisms share, written once. No parameters, no precision handling."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.precision import upcast

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
"""Feature maps that act entry by entry."""


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
    q = q.contiguous()  # by head, once for both products
    denominator = linear_denominator(q, k, eps, mean)
    context = k.mT @ v
    if mean:
        context = context / k.shape[-2]
    return (q @ context).div_(denominator)


def linear_factors(q: Tensor, k: Tensor, eps: float, mean: bool = False) -> tuple[Tensor, Tensor]:
    """Factors (B, h, N, dk), (B, h, M, dk) of the matrix that `linear_attention` applies to v."""
    return q / linear_denominator(q, k, eps, mean), k / k.shape[-2] if mean else k


def linear_denominator(q: Tensor, k: Tensor, eps: float, mean: bool = False) -> Tensor:
    """`q . sum_m k_m + eps` (B, h, N, 1), or with the mean over the keys."""
    total = k.mean(-2, keepdim=True) if mean else k.sum(-2, keepdim=True)
    product: Tensor = torch.linalg.vecdot(q, total)
    return product.unsqueeze(-1) + eps


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


def unit(x: Tensor, eps: float, order: float = 2, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """Vectors brought to length one, `x / max(||x||, eps)`, with norms of the given order over `dims`.

    A vector of zeros stays zero at any eps and hands its gradient on as it is, where the quotient would make 1 / eps.
    """
    norm: Tensor = torch.linalg.vector_norm(x, order, dims, keepdim=True)
    return x / norm.clamp_min(eps).masked_fill(norm == 0, 1)


def focus(x: Tensor, factor: float, dims: tuple[int, ...]) -> Tensor:
    """The focused function `f_p(x) = ||x|| x^p / ||x^p||` (FLatten, Eq. 5) with L2 norms over `dims`.

    Keeps the norm and the order of the entries and sharpens the direction. Dividing by the largest entry first changes
    nothing (f_p is the same for x and c x up to the factor c) but keeps x^p from under- and overflowing at any p.

    Args:
        x: Non-negative features.
        factor: The focusing factor p >= 1.
        dims: Dimensions of the vector.
    """
    tiny = torch.finfo(x.dtype).tiny
    peak = x.detach().amax(dims, keepdim=True)
    # The largest power becomes 2^30, not 1: squares of small powers are then no denormal numbers, which are slow.
    powered = (x / (peak * 2 ** (-30 / factor)).clamp_min(tiny)).pow_(factor)
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
    ratio: Tensor = norm / torch.linalg.vector_norm(powered, dim=dims, keepdim=True).clamp_min(tiny)
    # By head in memory, as matrix products want it, and in place: on a CPU fresh memory costs more than arithmetic.
    return powered.clone(memory_format=torch.contiguous_format).mul_(ratio)


def resize_tokens(tokens: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Bicubic resize of a table of patch tokens (1, H*W, C) from one grid to another."""
    if old == new:
        return tokens
    grid = tokens.mT.unflatten(2, old)  # (1, C, H, W)
    resized = F.interpolate(upcast(grid), size=new, mode="bicubic", align_corners=False)
    return resized.to(tokens.dtype).flatten(2).mT  # (1, H'*W', C)
