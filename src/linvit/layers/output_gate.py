"""What stands between a mechanism and the output projection of its layer: a norm, and a gate that the input opens."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import HOST_OPTIONS, Attention
from linvit.attention.ops.recompute import recomputed
from linvit.errors import check_choice


class OutputGate(nn.Linear):
    """Multiplies the output of a mechanism by a linear map of the layer's input, or by SiLU of that.

    Args:
        dim: Channels C of the input.
        out_dim: Channels of the output.
        silu: Apply SiLU.
        bias: Bias of the linear map.

    Attributes:
        recompute: See `linvit.Attention`.
    """

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
    check_choice(f"{type(mechanisms[0]).__name__}.out_norm", mechanisms[0].out_norm, HOST_OPTIONS["out_norm"])
    width = sum(mechanism.out_dim for mechanism in mechanisms)
    return nn.LayerNorm(width, eps=1e-5) if mechanisms[0].out_norm == "ln" else None


def output_gate(mechanisms: Sequence[Attention], dim: int, *, bias: bool = True) -> OutputGate | None:
    """Builds what mechanisms of one spec declare as `gate`, from C = `dim` channels to their outputs side by side."""
    check_choice(f"{type(mechanisms[0]).__name__}.gate", mechanisms[0].gate, HOST_OPTIONS["gate"])
    if mechanisms[0].gate == "none":
        return None
    width = sum(mechanism.out_dim for mechanism in mechanisms)
    return OutputGate(dim, width, silu=mechanisms[0].gate == "silu", bias=bias)


def normed_and_gated(out: Tensor, x: Tensor, norm: nn.LayerNorm | None, gate: OutputGate | None) -> Tensor:
    """Applies what there is of `output_norm` and `output_gate` to outputs (B, N, out_dim), given the layer's input."""
    if norm is not None:
        out = norm(out)
    return out if gate is None else gate(out, x)
