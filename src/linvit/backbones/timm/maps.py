"""Replaces attention on maps: MaxViT's windows and grids, CoAtNet, and SAM's image encoder, which is ViTDet's."""

from typing import Any

from timm.models import maxxvit, vision_transformer_sam
from torch import Tensor

from linvit.attention.base import Grid
from linvit.backbones.timm.hosts import ACCEPTED, Model, ReplacedAttention
from linvit.errors import UserError
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
        self.rel_pos = source.rel_pos if self.mechanism.host.accepts_bias else None
        self.channels_first = isinstance(source, maxxvit.Attention2d)

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        """Mixes the tokens of the map."""
        x = x.permute(0, 2, 3, 1) if self.channels_first else x
        out = self.mixed(x.flatten(1, 2), Grid((x.shape[1], x.shape[2])), bias=shared_rel_pos)
        out = self.project(out.unflatten(1, x.shape[1:3]), x)
        return out.permute(0, 3, 1, 2) if self.channels_first else out

    def position_bias(self, q: Tensor, grid: Grid) -> Tensor | None:
        """Returns the model's bias of relative positions, (1, h, N, N)."""
        return None if self.rel_pos is None else self.rel_pos.get_bias()


class ReplacedSAMAttention(ReplacedAttention):
    """Replaces SAM's attention of a map (B, H, W, C). Mechanisms that accept a bias get SAM's relative positions."""

    sources = (vision_transformer_sam.Attention,)
    kept = ReplacedAttention.kept | {"rel_pos_h", "rel_pos_w"}

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        if source.rope is not None:
            raise UserError(f"SAM's attention with rotary positions cannot be replaced; {ACCEPTED}")
        side = model.parent(name).window_size  # 0 is the whole map
        super().__init__(source, spec, Grid((side, side) if side else model.patches.grid.size))
        if side:
            self.refuse_stem("SAM")
        biased = source.use_rel_pos and self.mechanism.host.accepts_bias
        self.rel_pos_h = source.rel_pos_h if biased else None
        self.rel_pos_w = source.rel_pos_w if biased else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        return self.mix(x.flatten(1, 2), Grid((x.shape[1], x.shape[2]))).view_as(x)

    def position_bias(self, q: Tensor, grid: Grid) -> Tensor | None:
        """Returns the products of each query with the embeddings of its distances in rows and columns, (B, h, N, N)."""
        if self.rel_pos_h is None or self.rel_pos_w is None:
            return None
        heads = self.mechanism.num_heads
        tokens = q.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1)  # (B h, N, d)
        bias: Tensor = vision_transformer_sam.get_decomposed_rel_pos_bias(
            tokens, self.rel_pos_h, self.rel_pos_w, grid.size, grid.size
        )
        return bias.view(-1, heads, *bias.shape[1:])
