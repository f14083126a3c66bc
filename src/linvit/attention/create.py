"""Builds mechanisms from specs."""

from typing import Any, cast

from linvit.attention.base import Attention, Grid
from linvit.registry import Spec, attentions


def create_attention(spec: Spec, *, dim: int, num_heads: int, grid: Grid, **options: Any) -> Attention:
    """Builds the attention that a spec describes.

    Args:
        spec: A name, or a mapping with `name` and options of the mechanism.
        dim: Channels of the values over all heads.
        num_heads: Heads, which must divide `dim`.
        grid: Where the tokens lie; of the queries, and of keys and values if they have another.
        options: Further options of the mechanism, such as `key_dim`.

    Raises:
        UserError: If there is no such name, or it does not take an option.

    Example:
        >>> linvit.create_attention("linear", dim=192, num_heads=3, grid=Grid((14, 14)))
    """
    return cast("Attention", attentions.create(spec, dim=dim, num_heads=num_heads, grid=grid, **options))
