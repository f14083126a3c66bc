"""Circulant attention: `o_c[n] = sum_t p_c[t] v_c[n + t]`, `p_c = softmax_t(N^-1/2 sum_n q_c[n] k_c[n + t])`.

Each channel c is a head. Tokens n are on a torus of H x W patches, t is a shift on it, and all sums are products of
two-dimensional Fourier transforms. Every query has the same weights, shifted to its place: a convolution with a kernel
as large as the map, which follows from the image. The left edge sees the right one.

Paper: Han et al. 2025, "Vision Transformers are Circulant Attention Learners" (AAAI 2026). Follows the authors' code,
whose factor is `N^-1/2` where the paper writes 1/N.
Cost: `6 P C T + 2 F C + 2 P C` elementwise operations without prefix tokens, for transforms of P patches to F
frequencies that take `T = log2 P` operations a patch. Rank: up to P per channel. Rows and columns sum to 1.

The host gates the output by SiLU and projects q, k and v without a bias: those of q and k have no effect, that of v is
the output's. The reference has no prefix tokens. Here one counts as one more shift, at which all queries see its key
and its value, and is itself a query of softmax attention to all tokens, channel by channel.

Fourier transforms run in float32, since half precision has them on a GPU only, at powers of two. An exported model
takes complex ones.
"""

import torch
from torch import Tensor
from torch.fft import fft2, ifft2, irfft2, rfft2

from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts, Gate, Host
from linvit.attention.ops.functional import is_exporting


class CirculantAttention(Attention):
    """Attention by a circulant matrix for each channel, made of Fourier transforms, O(N log N).

    Args:
        gate: Factor of the output; see `linvit.Host`.
    """

    host = Host(bias=False)
    facts = Facts(complexity="O(N log N)", same_grid=True, same_width=True, channelwise=True)

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None, gate: Gate = "silu"
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.declare(gate=gate)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, d) three times -> (B, h, N, d)."""
        prefix = grid.num_prefix
        queries, keys, values = (x[:, :, prefix:].mT.unflatten(-1, grid.size) for x in (q, k, v))  # (B, h, d, H, W)
        products = correlation(queries, keys).flatten(-2)  # (B, h, d, P)
        if prefix:
            total = q[:, :, prefix:].sum(2, keepdim=True)
            products = torch.cat([(total * k[:, :, :prefix]).mT, products], dim=-1)
        weights = (products * (grid.size[0] * grid.size[1]) ** -0.5).softmax(-1)
        out = correlation(weights[..., prefix:].unflatten(-1, grid.size), values).flatten(-2).mT
        if not prefix:
            return out
        out = out + (weights[..., :prefix].mT * v[:, :, :prefix]).sum(2, keepdim=True)
        seen = (q[:, :, :prefix, None] * k[:, :, None]).softmax(3)  # (B, h, prefix, N, d)
        return torch.cat([(seen * v[:, :, None]).sum(3), out], dim=2)


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """`sum_n a[n] b[n + t]` for each shift t of a torus, planes (..., H, W)."""
    if is_exporting():  # onnxruntime cannot run an inverse transform to real numbers
        product: Tensor = ifft2(fft2(a).conj() * fft2(b)).real
        return product
    if not len(a):  # which torch 2.11 cannot transform
        return a * b
    product = irfft2(rfft2(a).conj() * rfft2(b), s=a.shape[-2:])
    return product
