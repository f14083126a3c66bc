"""What attention layers do around a mechanism: stem, projections, heads, norm, gate, projection back."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.ops.decorators import recomputed
from linvit.errors import UserError
from linvit.layers.mlp import BatchNormLinear


class ConvStem(nn.Module):
    """A linear layer, a depthwise 3 x 3 convolution of the patches and SiLU, (B, N, C) -> (B, N, C).

    Prefix tokens take no part in the convolution. Paper: Han et al. 2024, "Demystify Mamba in Vision: A Linear
    Attention Perspective", Fig. 3.
    """

    recompute: bool = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(dim, dim)
        self.conv = nn.Conv2d(dim, dim, 3, padding=1, groups=dim)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        return self._convolved(self.in_proj(x), grid)

    @recomputed
    def _convolved(self, x: Tensor, grid: Grid) -> Tensor:
        return F.silu(grid.map_patches(self.conv, x))


def input_stem(mechanism: Attention, dim: int) -> ConvStem | None:
    """Builds what a mechanism declares as `stem`, for C = `dim` channels."""
    return ConvStem(dim) if mechanism.stem == "conv_silu" else None


class OutputGate(nn.Linear):
    """Multiplies the output of a mechanism by a linear map of the layer's input, or by SiLU of that."""

    recompute: bool = True
    OPEN = 1.278464542761074  # where SiLU is 1

    def __init__(self, dim: int, out_dim: int, *, silu: bool, bias: bool = True) -> None:
        super().__init__(dim, out_dim, bias=bias)
        self.silu = silu

    def forward(self, out: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]  # of two tensors
        """(B, N, out_dim) and the layer's input (B, N, C) -> (B, N, out_dim)."""
        gate = super().forward(x)
        return self._silu_times(out, gate) if self.silu else out * gate

    @recomputed
    def _silu_times(self, out: Tensor, gate: Tensor) -> Tensor:
        return out * F.silu(gate)

    @torch.no_grad()
    def init_open(self) -> None:
        """Sets the gate to 1, as a gate that joins trained weights should begin; it needs the bias."""
        if self.bias is not None:
            nn.init.zeros_(self.weight)
            nn.init.constant_(self.bias, self.OPEN if self.silu else 1)


def output_norm(mechanisms: Sequence[Attention]) -> nn.LayerNorm | None:
    """Builds what mechanisms of one spec declare as `out_norm`, over their outputs side by side."""
    width = sum(mechanism.out_dim for mechanism in mechanisms)
    return nn.LayerNorm(width, eps=1e-5) if mechanisms[0].out_norm == "ln" else None


def output_gate(mechanisms: Sequence[Attention], dim: int, *, bias: bool = True) -> OutputGate | None:
    """Builds what mechanisms of one spec declare as `gate`, from C = `dim` channels to their outputs side by side."""
    if mechanisms[0].gate == "none":
        return None
    width = sum(mechanism.out_dim for mechanism in mechanisms)
    return OutputGate(dim, width, silu=mechanisms[0].gate == "silu", bias=bias)


def normed_and_gated(out: Tensor, x: Tensor, norm: nn.LayerNorm | None, gate: OutputGate | None) -> Tensor:
    """Applies what there is of `output_norm` and `output_gate` to outputs (B, N, out_dim), given the layer's input."""
    if norm is not None:
        out = norm(out)
    return out if gate is None else gate(out, x)


def projection_widths(mechanism: Attention) -> list[int]:
    """Returns the channels of each projection, one number per letter of `projections`."""
    key_width = mechanism.key_dim * mechanism.num_heads
    widths = {"q": key_width, "k": key_width, "v": mechanism.dim}
    return [widths[letter] for letter in mechanism.projections]


def output_projection(mechanisms: Sequence[Attention], dim: int, *, bias: bool = True) -> nn.Linear:
    """Builds the linear layer from the outputs of mechanisms of one spec, side by side, to C = `dim` channels.

    The norm that they declare as `proj_norm` follows it, and its shift replaces the bias.
    """
    width = sum(mechanism.out_dim for mechanism in mechanisms)
    if mechanisms[0].proj_norm == "bn2d":
        return BatchNormLinear(width, dim)
    return nn.Linear(width, dim, bias=bias)


def queries_keys_values(mechanism: Attention, projected: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, (B, N, C) each with heads not yet split, from the projections of the input x."""
    parts = dict(zip(mechanism.projections, projected, strict=True))
    q = parts.get("q", x)  # "kv": the query is the input itself
    return q, parts.get("k", q), parts.get("v", x)  # "qv": the key is the query; "qk": the value is the input


def attend(
    mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid, *, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Splits q (B, N, h dk), k and v (B, M, h d) into heads, calls a mechanism, joins its output, (B, N, out_dim)."""
    extra = {}
    if bias is not None:
        if not mechanism.takes_bias:
            raise UserError(f"{type(mechanism).__name__} takes no position bias (takes_bias is False)")
        extra["bias"] = bias
    if mechanism.takes_input:
        extra["x"] = x
    heads = mechanism.num_heads
    q = q.reshape(*q.shape[:2], heads, -1).transpose(1, 2)  # (B, h, N, d)
    k = k.reshape(*k.shape[:2], heads, -1).transpose(1, 2)
    v = v.reshape(*v.shape[:2], heads, -1).transpose(1, 2)
    out: Tensor = mechanism(q, k, v, grid, **extra)
    return out.transpose(1, 2).flatten(2)
