"""What every host of a mechanism does: project what it declares, split heads, call it, join the heads, project back."""

from collections.abc import Sequence

from torch import Tensor, nn

from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.layers.batch_norm import BatchNormLinear


def projection_widths(mechanism: Attention) -> list[int]:
    """Channels of what the host projects, one number per letter of `projections`."""
    key_width = mechanism.key_dim * mechanism.num_heads
    widths = {"q": key_width, "k": key_width, "v": mechanism.dim}
    return [widths[letter] for letter in mechanism.projections]


def output_projection(mechanisms: Sequence[Attention], dim: int, *, bias: bool = True) -> nn.Linear:
    """The linear layer from what mechanisms of one spec put out, side by side, to C = `dim` channels.

    It is followed by the norm that they declare as `proj_norm`, whose shift takes the place of the bias.
    """
    width = sum(mechanism.out_dim for mechanism in mechanisms)
    if mechanisms[0].proj_norm == "bn2d":
        return BatchNormLinear(width, dim)
    return nn.Linear(width, dim, bias=bias)


def queries_keys_values(mechanism: Attention, projected: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v from what was projected of the input x: (B, N, C) each, heads not yet split."""
    parts = dict(zip(mechanism.projections, projected, strict=True))
    q = parts.get("q", x)  # "kv": the query is the input itself
    return q, parts.get("k", q), parts["v"]  # "qv": the key is the query


def attend(
    mechanism: Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid, *, x: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Calls a mechanism on tokens whose heads are not split, nor those of the result.

    Args:
        mechanism: Called with (B, h, N, dk), (B, h, M, dk), (B, h, M, d).
        q: Queries (B, N, h * dk).
        k: Keys (B, M, h * dk).
        v: Values (B, M, h * d).
        grid: Where the tokens lie.
        x: The host's input (B, N, C), for a mechanism that takes it.
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

    def heads(tokens: Tensor) -> Tensor:
        """(B, N, C) -> (B, h, N, d)."""
        return tokens.reshape(*tokens.shape[:2], mechanism.num_heads, -1).transpose(1, 2)

    out: Tensor = mechanism(heads(q), heads(k), heads(v), grid, **extra)
    return out.transpose(1, 2).flatten(2)
