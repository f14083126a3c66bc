"""Attention of Hiera, whose tokens are in the order of its mask units."""

import math
from typing import Any

import torch
from timm.models import hiera
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.backbones.timm.hosts import Model, ReplacedAttention
from linvit.layers.hosting import queries_keys_values
from linvit.layers.spatial_reduction import reducible
from linvit.registry import Spec


class ReplacedHieraAttention(ReplacedAttention):
    """Replaces Hiera's attention in mask units or on the whole map; the first one of a stage halves the map.

    To halve it, queries are pooled (maximum of 2 x 2), or outputs if a mechanism needs as many keys as queries.
    """

    sources = (hiera.MaskUnitAttention,)
    rows_first: Tensor
    units_first: Tensor

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        block, schedule = int(name.split(".")[1]), model.network.reroll.schedule
        (before, size), (after, pooled) = schedule[max(block - 1, 0)], schedule[block]
        if source.use_mask_unit_attn:
            size, pooled = unit_size(before), unit_size(after)
        self.size, self.pooled = (size[0], size[1]), (pooled[0], pooled[1])
        super().__init__(source, spec, Grid(self.size))
        self.q_stride = source.q_stride  # read by the block
        if source.use_mask_unit_attn:
            self.refuse_stem("Hiera")
        self.strides = before, after
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Creates the orders of tokens, as timm's method of this name creates buffers; called by transformers."""
        before, after = self.strides
        self.register_buffer("rows_first", unit_order(self.size, before).argsort(), persistent=False)
        self.register_buffer("units_first", unit_order(self.pooled, after), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N or N / 4, C')."""
        units = x.shape[1] // len(self.rows_first)
        x = x.unflatten(1, (-1, units)).transpose(1, 2).flatten(0, 1)[:, self.rows_first]  # (B units, h w, C)
        grid = Grid(self.size)
        t = self.stemmed(x, grid)
        q, k, v = queries_keys_values(self.mechanism, self.projected(t), t)
        if self.pooled != self.size and reducible(self.mechanism):
            out = self.attended(t, self.pool(q), k, v, Grid(self.pooled, kv_size=self.size))
        else:
            out = self.pool(self.attended(t, q, k, v, grid))
        gating = out if self.gate is None else self.in_units(self.pool(x), units)
        return self.project(self.in_units(out, units), gating)

    def pool(self, x: Tensor) -> Tensor:
        """Takes the maximum of neighbours, (B units, h w, C) -> (B units, h' w', C); only in the first block."""
        ratio = self.size[0] // self.pooled[0]
        return x if ratio == 1 else Grid(self.size).map_patches(lambda plane: F.max_pool2d(plane, ratio), x)

    def in_units(self, x: Tensor, units: int) -> Tensor:
        """Brings (B units, h' w', C) back to the model's order, (B, N, C)."""
        x = x[:, self.units_first].unflatten(0, (-1, units))
        return x.transpose(1, 2).flatten(1, 2)


def unit_size(strides: list[tuple[int, ...]]) -> tuple[int, int]:
    """Returns the size in tokens of a mask unit, which these strides reduce to one token."""
    return math.prod(rows for rows, _ in strides), math.prod(columns for _, columns in strides)


def unit_order(size: tuple[int, int], strides: list[tuple[int, ...]]) -> Tensor:
    """Returns the patch, counted row by row, at each position of a unit or map, (h w,)."""
    patches = torch.arange(math.prod(size)).view(1, -1, 1)
    return hiera.Unroll(size, (1, 1), strides)(patches).flatten()  # type: ignore[no-any-return]
