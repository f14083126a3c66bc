"""Focused linear attention (FLatten): `o = phi_p(q) (phi_p(k)^T v) / (phi_p(q) mean phi_p(k) + eps) + DWC(v)`.

`phi_p(x) = f_p(relu(x))` with `f_p(x) = ||x|| x^p / ||x^p||` sharpens the directions of q and k, and a depthwise
convolution (DWC) of the values brings the rank of the map back from d to N.

Paper: Han et al. 2023, "FLatten Transformer: Vision Transformer using Focused Linear Attention", Eqs. 4-9.
Cost: `(N + M) C dk + N h dk + k^2 P C` MACs with a kernel of side k. Rank: N per channel (d without the convolution).

Paper and code differ, and the default here is the code: the norms of f_p run over all heads together
(`norm_scope="per_head"` is the paper), q and k are divided by a learnable scale per channel (`learn_scale`), and k gets
a learnable position encoding (`pos_enc`).
"""

import math
from functools import partial
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid, Packed
from linvit.attention.declarations import Facts
from linvit.attention.kernels import Formula
from linvit.attention.ops.activations import focused, focused_powers, of_both, trains_by_hand
from linvit.attention.ops.functional import (
    SizeOf,
    l2_norm,
    resize_table,
    resize_tokens,
    split_heads,
    upcast,
)
from linvit.attention.ops.linear import linear_attention, linear_factors
from linvit.attention.ops.value_conv import ConvolvedAttention, depthwise_conv
from linvit.errors import check_number, check_odd


class FocusedAttention(ConvolvedAttention):
    """Focused linear attention with a depthwise convolution of the values, O(N d^2).

    Args:
        grid: Nominal grid; fixes the length of the position encoding, which is resized (bicubic) for another grid.
        focusing_factor: The power p >= 1; 1 changes nothing.
        dwc_kernel: Side k of the depthwise kernel, odd.
        dwc: Add the depthwise convolution of v. One kernel per channel of a head, shared by the heads; it reads and
            writes patch tokens only.
        focus: Apply f_p; False leaves plain relu features (the paper's ablation).
        norm_scope: "all_heads": the norms of f_p run over all C channels (the reference code); "per_head": over d (the
            paper).
        pos_enc: Add the learnable position encoding (1, M, C) to k. Prefix tokens get none.
        learn_scale: Divide q and k by softplus of the learnable scale (1, 1, C).
        relu_eps: Added to the relu features.
        eps: Added to the denominator.
        denominator: "mean" over the keys (the reference since 2024) or "sum" (before): eps then weighs 1/M as much.
        stable_power: Divide by the largest entry before the power: the same function, safe at every p. False is the
            reference's order of operations, which gives NaN for p >= 8.
        sr_interp: How v comes back to N tokens for the convolution under spatial reduction: "linear1d", along the
            flattened tokens (the reference), or "bilinear2d".
    """

    facts = Facts(complexity="O(N)", packs=True)
    precision = "mixed"
    convolution = "dwc"

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        focusing_factor: float = 3,
        dwc_kernel: int = 5,
        dwc: bool = True,
        focus: bool = True,
        norm_scope: Literal["all_heads", "per_head"] = "all_heads",
        pos_enc: bool = True,
        learn_scale: bool = True,
        relu_eps: float = 1e-6,
        eps: float = 1e-6,
        denominator: Literal["mean", "sum"] = "mean",
        stable_power: bool = True,
        sr_interp: Literal["linear1d", "bilinear2d"] = "linear1d",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("focusing_factor", focusing_factor, at_least=1, note=" (1: no focusing)")
        check_odd("dwc_kernel", dwc_kernel, "3 or 5")
        check_number("relu_eps", relu_eps, at_least=0)
        check_number("eps", eps, at_least=0)
        self.focusing_factor = focusing_factor if focus else 1
        self.norm_scope = norm_scope
        self.relu_eps = relu_eps
        self.eps = eps
        self.denominator = denominator
        self.stable_power = stable_power
        self.sr_interp = sr_interp
        self.declare(channelwise=dwc, max_rank=self.key_dim)

        width = self.key_dim * num_heads
        self.scale = nn.Parameter(torch.zeros(1, 1, width)) if learn_scale else None
        self.table_size = grid.keys_size
        self.positional_encoding = nn.Parameter(torch.zeros(1, math.prod(self.table_size), width)) if pos_enc else None
        self.dwc = depthwise_conv(self.head_dim, dwc_kernel) if dwc else None
        self.relu_alone = self.focusing_factor == 1 and not learn_scale and not relu_eps  # the whole feature map

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        v = v.contiguous()  # once for both parts
        if self.dwc is None:
            return self.core(q, k, v, grid)
        local = self.convolved(v, grid)  # head by head
        return self.core(q, k, v, grid) + local  # token by token, like the first

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """Returns the linear attention on focused features."""
        q, k = self.features(q, k, grid, v.dtype)
        return linear_attention(q, k, v, self.eps, mean=self.denominator == "mean", grid=grid)

    def features(self, q: Tensor, k: Tensor, grid: Grid, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Focused features of q (B, h, N, dk) and k (B, h, M, dk), in the same shapes, computed in at least float32.

        They are rounded to `dtype`.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        dtype, table = dtype or wide, self.positional_encoding
        encoding = None if table is None else self._encoding(table, grid).to(wide)  # (1, M, h dk)
        if torch.is_grad_enabled() and self.focusing_factor != 1 and self.stable_power and trains_by_hand(q):
            return self._focused(q, k, encoding, wide, dtype)
        queries, keys = q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2)
        keys = keys if encoding is None else keys + encoding  # (B, M, h dk)
        if self.relu_alone:  # for which rounding can come first
            return of_both(F.relu, q.to(dtype), split_heads(keys.to(dtype), self.num_heads))
        return of_both(partial(self._phi, wide, dtype), queries, keys)

    def _encoding(self, table: Tensor, grid: Grid | Packed) -> Tensor:
        """Returns the position encoding for a grid, (1, M, h dk)."""
        if isinstance(grid, Packed):
            return grid.table(partial(self._encoding, table))
        encoding = resize_tokens(table, self.table_size, grid.kv_size or grid.size)
        return F.pad(encoding, (0, 0, grid.num_prefix, 0)) if grid.num_prefix else encoding  # which have no position

    def formula(self, q: Tensor, k: Tensor, grid: Grid) -> Formula | None:
        """Returns the kernel, with the stable order of operations."""
        if not self.stable_power:
            return None
        return Formula(
            "relu" if self.focusing_factor == 1 and self.scale is None else "focused",
            eps=self.eps,
            mean=self.denominator == "mean",
            relu_eps=self.relu_eps,
            power=self.focusing_factor,
            all_heads=self.norm_scope == "all_heads",
            factor=None if self.scale is None else F.softplus(upcast(self.scale)).reciprocal().flatten(),
            shift=None if self.positional_encoding is None else self._encoding(self.positional_encoding, grid)[0],
        )

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        """Returns the position encoding of a checkpoint for the nominal grid (bicubic)."""
        name, own = "positional_encoding", self.positional_encoding
        if own is not None and name in state:
            state[name] = resize_table(state[name], own, self.table_size, size_of)
        return state

    def _focused(
        self, q: Tensor, k: Tensor, encoding: Tensor | None, wide: torch.dtype, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Returns the feature map f_p; on a GPU q and k, if they have one shape, take one pass."""
        shape = self.num_heads, self.key_dim
        scale = None if self.scale is None else self.scale.to(wide).view(shape)
        factor = q.new_ones(shape, dtype=wide) if scale is None else F.softplus(scale).reciprocal()
        shift = None if encoding is None else encoding.unflatten(2, shape)
        all_heads = self.norm_scope == "all_heads"

        def phi(xs: list[Tensor], shift: Tensor | None) -> tuple[Tensor, ...]:
            return focused(xs, shift, factor, self.relu_eps, self.focusing_factor, all_heads, dtype)

        q, k = q.transpose(1, 2), k.transpose(1, 2)
        q, k = phi([q, k], shift) if q.is_cuda and q.shape == k.shape else (*phi([q], None), *phi([k], shift))
        return q.transpose(1, 2), k.transpose(1, 2)

    def _phi(self, wide: torch.dtype, dtype: torch.dtype, x: Tensor) -> Tensor:
        """Returns features (..., h, N, dk) of tokens (..., N, h dk), computed in `wide` and rounded to `dtype`."""
        tokens, x = x.shape[:-1], F.relu(x.to(wide))
        if self.scale is not None:
            factor = F.softplus(self.scale.to(x.dtype)).reciprocal()
            x = torch.addcmul(self.relu_eps * factor, x, factor)
        elif self.relu_eps:
            x = x + self.relu_eps
        if self.focusing_factor != 1:
            vectors = x if self.norm_scope == "all_heads" else x.unflatten(-1, (self.num_heads, -1))
            if self.stable_power:
                powered, norms, _ = focused_powers(vectors, self.focusing_factor)
                x = powered * norms
            else:
                powered = vectors**self.focusing_factor
                x = powered / l2_norm(powered) * l2_norm(vectors)
        return x.reshape(*tokens, self.num_heads, self.key_dim).transpose(-3, -2).to(dtype)

    def convolved(self, v: Tensor, grid: Grid) -> Tensor:
        """Returns the depthwise convolution of the patch values, (B, h, M, d) -> (B, h, N, d); 0 for prefix tokens."""
        if isinstance(grid, Packed):
            dwc = cast("nn.Conv2d", self.dwc)
            return grid.convolve(dwc, v[0], cast("int", dwc.padding[0]))[None].to(v.dtype)
        patches = v[:, :, grid.num_prefix :].flatten(0, 1).mT  # (B*h, d, patches)
        if grid.kv_size not in (None, grid.size):
            if self.sr_interp == "linear1d":
                patches = F.interpolate(patches, size=math.prod(grid.size), mode="linear", align_corners=False)
            else:
                plane = patches.unflatten(2, grid.keys_size)
                patches = F.interpolate(plane, size=grid.size, mode="bilinear", align_corners=False).flatten(2)
        local: Tensor = cast("nn.Conv2d", self.dwc)(patches.unflatten(2, grid.size)).flatten(2).mT  # (B*h, H*W, d)
        if grid.num_prefix:
            local = F.pad(local, (0, 0, grid.num_prefix, 0))
        return local.reshape(*v.shape[:2], *local.shape[1:]).to(v.dtype)

    def core_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Those of linear attention on focused features."""
        return linear_factors(*self.features(q, k, grid), self.eps, mean=self.denominator == "mean")
