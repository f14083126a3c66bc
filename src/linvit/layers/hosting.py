"""What attention layers do around a mechanism: project, split heads, call it, join heads, project back."""

from collections.abc import Sequence

from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.layers.batch_norm import BatchNormLinear
from linvit.layers.linear import Linear


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
    return Linear(width, dim, bias=bias)


def queries_keys_values(mechanism: Attention, projected: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, (B, N, C) each with heads not yet split, from the projections of the input x."""
    parts = dict(zip(mechanism.projections, projected, strict=True))
    q = parts.get("q", x)  # "kv": the query is the input itself
    return q, parts.get("k", q), parts.get("v", x)  # "qv": the key is the query; "qk": the value is the input


def attend(
    mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid, *, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Splits heads, calls a mechanism, and joins the heads of its output.

    Args:
        mechanism: Called with (B, h, N, dk), (B, h, M, dk), (B, h, M, d).
        q: Queries (B, N, h * dk).
        k: Keys (B, M, h * dk).
        v: Values (B, M, h * d).
        grid: Where the tokens lie.
        x: The layer's input (B, N, C), for a mechanism that takes it.
        bias: Position bias or mask (B or 1, h, N, M), for a mechanism that takes one.

    Returns:
        (B, N, out_dim).
    """
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
