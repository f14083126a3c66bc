"""Attention of maps, in MaxViT's windows and grids and in CoAtNet."""

from typing import Any

from timm.models import maxxvit
from torch import Tensor

from linvit.attention.base import Grid
from linvit.backbones.timm.hosts import Model, ReplacedAttention
from linvit.registry import Spec


class ReplacedMaxViTAttention(ReplacedAttention):
    """Replaces attention of a map or a part of it, (B, H, W, C) or (B, C, H, W)."""

    sources = (maxxvit.AttentionCl, maxxvit.Attention2d)
    kept = ReplacedAttention.kept | {"rel_pos"}

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        self.per_head = source.head_first
        part = getattr(model.parent(name), "partition_size", None)  # none in CoAtNet
        super().__init__(source, spec, Grid(tuple(part or model.level(name))))
        if part is not None:
            self.refuse_stem("MaxViT")
        self.rel_pos = source.rel_pos if self.mechanism.takes_bias else None
        self.channels_first = isinstance(source, maxxvit.Attention2d)

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """The map, mixed."""
        x = x.permute(0, 2, 3, 1) if self.channels_first else x
        out = self.mixed(x.flatten(1, 2), Grid((x.shape[1], x.shape[2])), bias=shared_rel_pos)
        out = self.project(out.unflatten(1, x.shape[1:3]), x)
        return out.permute(0, 3, 1, 2) if self.channels_first else out

    def position_bias(self, q: Tensor, grid: Grid) -> Tensor | None:
        """The model's bias of relative positions, (1, h, N, N)."""
        return None if self.rel_pos is None else self.rel_pos.get_bias()
