"""Tables with one row per position, brought to the grid of another image or window size."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from linvit.attention.base import Attention
from linvit.attention.ops.functional import resize_tokens
from linvit.backbones.stage import Stage
from linvit.layers.attention_layer import AttentionLayer


class Table(NamedTuple):
    """How a parameter of a model is laid out.

    Attributes:
        size: Its grid, (H, W).
        prefix: Rows before those of the grid.
        mode: How the official code interpolates it.
    """

    size: tuple[int, int]
    prefix: int = 0
    mode: Literal["bicubic", "bilinear"] = "bicubic"


def table_of(model: nn.Module, name: str, own: Tensor) -> Table | None:
    """What table a parameter is, or None if it is none.

    Position embeddings are interpolated linearly in stages (PVT, SOFT) and bicubically in DeiT and timm's models;
    the position encodings of focused attention and the relative position biases bicubically.
    """
    prefix, _, leaf = name.rpartition(".")
    owner = model.get_submodule(prefix)
    if leaf == "pos_embed" and own.ndim == 3:
        size = getattr(getattr(owner, "grid", None), "size", None)
        if size is None:  # timm's
            size = getattr(getattr(owner, "patch_embed", None), "grid_size", None)
        if size is None or own.shape[1] < math.prod(size):
            return None
        return Table(tuple(size), own.shape[1] - math.prod(size), "bilinear" if isinstance(owner, Stage) else "bicubic")
    if leaf == "positional_encoding" and isinstance(owner, Attention):
        return Table(owner.grid.keys_size)
    window = owner.mechanism.grid.size if isinstance(owner, AttentionLayer) else getattr(owner, "window_size", None)
    if leaf == "relative_position_bias_table" and window is not None:
        return Table((2 * window[0] - 1, 2 * window[1] - 1))
    return None


def square(rows: int, prefix: int) -> tuple[int, int] | None:
    """Side of the square grid of a table, and the rows before it; the expected number of those first."""
    for extra in dict.fromkeys([prefix, 0, 1, 2]):
        side = math.isqrt(max(rows - extra, 0))
        if side and side * side == rows - extra:
            return side, extra
    return None


def resize(given: Tensor, own: Tensor, table: Table) -> Tensor | None:
    """An official table, whose grid is square, on the grid of a model; None if it does not fit.

    Args:
        given: The file's, (1, N, C) or (N, C).
        own: The model's, which supplies rows of the prefix that the file does not have.
        table: How the model's is laid out.
    """
    rows = given.shape[-2] if given.ndim > 1 else 0
    found = square(rows, table.prefix)
    if found is None or (*given.shape[:-2], given.shape[-1]) != (*own.shape[:-2], own.shape[-1]):
        return None
    side, extra = found
    leading = given.reshape(1, rows, -1)
    shared = min(extra, table.prefix)
    parts = [leading[:, :shared], resize_tokens(leading[:, extra:], (side, side), table.size, table.mode)]
    if shared < table.prefix:
        parts.insert(1, own.reshape(1, own.shape[-2], -1)[:, shared : table.prefix].to(given.device, given.dtype))
    return torch.cat(parts, dim=1).reshape(own.shape)
