"""Parts of attention layers around a mechanism: stem, projections, heads, norm, gate, projection back."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid, Packed
from linvit.attention.ops.activations import normalize
from linvit.attention.ops.decorators import recomputed
from linvit.attention.ops.functional import upcast
from linvit.errors import UserError, check_choice
from linvit.layers.mlp import BatchNormLinear, Linear

CHECK = "linvit check NAME tests all requirements of an attention; NAME is its name or class path"
QKNorm = Literal["none", "rms", "l2"]


class QueryKeyNorm(nn.Module):
    """Norm of queries or keys (B, N, h d) before they are split into heads, computed in float32 or float64.

    "rms" divides by the root mean square of all channels, with a learnable factor per channel, initially 1 (Xie et al.
    2025, "SANA 1.5"). "l2" scales each head to length 1, with a learnable factor per head, initially sqrt(d) (Henry et
    al. 2020, "Query-Key Normalization for Transformers").
    """

    def __init__(self, kind: QKNorm, heads: int, width: int) -> None:
        super().__init__()
        self.kind = kind
        weight = torch.ones(heads * width) if kind == "rms" else torch.full((heads, 1), width**0.5)
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, h d) -> (B, N, h d)."""
        wide = upcast(x)
        if self.kind == "rms":
            wide = F.rms_norm(wide, wide.shape[-1:], self.weight.to(wide.dtype), 1e-5)
        else:
            heads = normalize(wide.unflatten(-1, (len(self.weight), -1)), 1e-6)
            wide = (heads * self.weight.to(wide.dtype)).flatten(-2)
        return wide.to(x.dtype)


def qk_norms(kind: QKNorm, mechanism: Attention) -> tuple[QueryKeyNorm | None, QueryKeyNorm | None]:
    """Builds the norms of q and of k for a mechanism, if its host projects them."""
    check_choice("qk_norm", kind, get_args(QKNorm))
    q, k = (
        None
        if kind == "none" or letter not in mechanism.host.project
        else QueryKeyNorm(kind, mechanism.key_heads, mechanism.key_dim)
        for letter in "qk"
    )
    return q, k


class ConvStem(nn.Module):
    """A linear layer, a depthwise 3 x 3 convolution of the patches and SiLU, (B, N, C) -> (B, N, C).

    Prefix tokens are not part of the convolution. Paper: Han et al. 2024, "Demystify Mamba in Vision: A Linear
    Attention Perspective", Fig. 3.
    """

    recompute: bool = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_proj = Linear(dim, dim)
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, grid: Grid | Packed) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        return self._convolved(self.in_proj(x), grid)

    @recomputed
    def _convolved(self, x: Tensor, grid: Grid | Packed) -> Tensor:
        return F.silu(grid.map_patches(self.conv, x))


class OutputGate(Linear):
    """Multiplies the output of a mechanism by a linear map of the layer's input, or by SiLU of it."""

    recompute: bool = True
    OPEN = 1.278464542761074  # where SiLU is 1

    def __init__(self, dim: int, out_dim: int, *, silu: bool, bias: bool = True) -> None:
        super().__init__(dim, out_dim, bias=bias)
        self.silu = silu

    def forward(self, out: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]  # of two tensors
        """Maps (B, N, out_dim) and the layer's input (B, N, C) to (B, N, out_dim)."""
        gate = super().forward(x)
        return self._silu_times(out, gate) if self.silu else out * gate

    @recomputed
    def _silu_times(self, out: Tensor, gate: Tensor) -> Tensor:
        return out * F.silu(gate)

    @torch.no_grad()
    def init_open(self) -> None:
        """Sets the gate to 1, as needed for a gate that is added to trained weights; requires the bias."""
        if self.bias is not None:
            nn.init.zeros_(self.weight)
            nn.init.constant_(self.bias, self.OPEN if self.silu else 1)


class AttentionHost(nn.Module):
    """Base class of attention layers: the parts around parallel mechanisms of one spec."""

    q: nn.Linear
    kv: nn.Linear
    qkv: nn.Linear
    proj: nn.Linear
    proj_drop: nn.Module

    def surround(
        self,
        mechanisms: Sequence[Attention],
        dim: int,
        *,
        bias: bool = True,
        proj_bias: bool = True,
        proj_drop: float = 0.0,
        reduced: bool = False,
    ) -> None:
        """Adds stem, projections of input and output, norm and gate, as the mechanisms declare them, for C = `dim`.

        One projection gives q, k and v, unless keys and values come from other tokens than the queries (`reduced`).
        """
        for mechanism in mechanisms:
            own = type(mechanism)
            if (own.forward, own.core) == (Attention.forward, Attention.core):
                raise UserError(f"{own.__name__} has no formula: define core(self, q, k, v, grid). {CHECK}")
        host, out_dim = mechanisms[0].host, sum(mechanism.out_dim for mechanism in mechanisms)
        self.projections = host.project  # in the order of the rows of `qkv`
        self.stem = ConvStem(dim) if host.stem == "conv_silu" else None
        key_widths = [mechanism.key_dim * mechanism.key_heads for mechanism in mechanisms]
        letters = {"q": key_widths, "k": key_widths, "v": [mechanism.dim for mechanism in mechanisms]}
        self.widths = [width for letter in self.projections for width in letters[letter]]
        if reduced:
            self.q = Linear(dim, self.widths[0], bias=bias and host.bias)
            self.kv = Linear(dim, sum(self.widths[1:]), bias=bias and host.bias)
        else:
            self.qkv = Linear(dim, sum(self.widths), bias=bias and host.bias)
        self.out_norm = nn.LayerNorm(out_dim, eps=1e-5) if host.norm == "ln" else None
        self.gate = None if host.gate == "none" else OutputGate(dim, out_dim, silu=host.gate == "silu", bias=bias)
        # The shift of the norm replaces the bias.
        normed = host.norm == "bn2d"
        self.proj = BatchNormLinear(out_dim, dim) if normed else Linear(out_dim, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def project(self, out: Tensor, x: Tensor) -> Tensor:
        """Applies norm, gate by the layer's input x (B, N, C), projection and dropout, (B, N, out_dim) -> (B, N, C)."""
        if self.out_norm is not None:
            out = self.out_norm(out)
        if self.gate is not None:
            out = self.gate(out, x)
        return self.proj_drop(self.proj(out))  # type: ignore[no-any-return]


def queries_keys_values(
    mechanism: Attention,
    projected: Sequence[Tensor],
    x: Tensor,
    norms: Sequence[nn.Module | None] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, (B, N, C) each, before splitting into heads, from the projections of the input x.

    `norms` are applied to the projected q and k, where they are not None.
    """
    parts = dict(zip(mechanism.host.project, projected, strict=True))
    for letter, norm in zip("qk", norms, strict=False):
        if norm is not None:
            parts[letter] = norm(parts[letter])
    q = parts.get("q", x)  # "kv": the query is the input itself
    return q, parts.get("k", q), parts.get("v", x)  # "qv": the key is the query; "qk": the value is the input


def attend(
    mechanism: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: Grid | Packed,
    *,
    x: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Splits q (B, N, h dk), k and v (B, M, h d) into heads, calls a mechanism, joins its output, (B, N, out_dim)."""
    extra = {} if mask is None else {"mask": mask}
    if bias is not None:
        if not mechanism.host.accepts_bias:
            raise UserError(f"{type(mechanism).__name__} takes no position bias (accepts_bias is False)")
        extra["bias"] = bias
    if mechanism.host.input:
        extra["x"] = x
    heads, key_heads = mechanism.num_heads, mechanism.key_heads
    # Widths are computed, because -1 cannot be inferred for an empty batch.
    q = q.reshape(*q.shape[:2], key_heads, q.shape[2:].numel() // key_heads).transpose(1, 2)  # (B, h, N, d)
    k = k.reshape(*k.shape[:2], key_heads, k.shape[2:].numel() // key_heads).transpose(1, 2)
    v = v.reshape(*v.shape[:2], heads, v.shape[2:].numel() // heads).transpose(1, 2)
    out: Tensor = mechanism(q, k, v, grid, **extra)
    right = isinstance(out, Tensor) and out.ndim == 4 and out.shape[2] == q.shape[2]
    if not right or out.shape[1] * out.shape[3] != mechanism.out_dim:
        raise wrong_output(mechanism, out, q, v)
    return out.transpose(1, 2).flatten(2)


def wrong_output(mechanism: Attention, out: Any, q: Tensor, v: Tensor) -> UserError:
    """Returns the error for a mechanism whose output is not (B, h', N, out_dim / h') for q (B, h, N, dk)."""
    given = str(tuple(out.shape)) if isinstance(out, Tensor) else f"a {type(out).__name__}"
    heads, tokens = v.shape[1], q.shape[2]
    return UserError(
        f"{type(mechanism).__name__} returned {given} for queries {tuple(q.shape)}; expected is (B, h, N, d) = "
        f"{(len(q), heads, tokens, mechanism.out_dim // heads)}: images, heads, queries, channels per head. {CHECK}"
    )
