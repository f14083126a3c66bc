"""Mathematics that several mechanisms share, written once. No parameters, no precision handling."""

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.precision import upcast


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
    left, right = linear_factors(q, k, eps, mean)
    return left @ (right.mT @ v)


def linear_factors(q: Tensor, k: Tensor, eps: float, mean: bool = False) -> tuple[Tensor, Tensor]:
    """Factors (B, h, N, dk), (B, h, M, dk) of the matrix that `linear_attention` applies to v."""
    if mean:
        k = k / k.shape[-2]
    return q / (q @ k.sum(-2).unsqueeze(-1) + eps), k


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
    peak = x.detach().amax(dims, keepdim=True).clamp_min(tiny)
    powered = torch.pow(x / peak, factor)
    norm = torch.linalg.vector_norm(x, dim=dims, keepdim=True)
    ratio: Tensor = norm / torch.linalg.vector_norm(powered, dim=dims, keepdim=True).clamp_min(tiny)
    return powered * ratio


def resize_tokens(tokens: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """Bicubic resize of a table of patch tokens (1, H*W, C) from one grid to another."""
    if old == new:
        return tokens
    grid = tokens.mT.unflatten(2, old)  # (1, C, H, W)
    resized = F.interpolate(upcast(grid), size=new, mode="bicubic", align_corners=False)
    return resized.to(tokens.dtype).flatten(2).mT  # (1, H'*W', C)
