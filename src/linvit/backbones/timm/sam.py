"""Attention of SAM's image encoder, which is ViTDet's: in windows or on the whole map."""

from typing import Any

from timm.models import vision_transformer_sam
from torch import Tensor

from linvit.attention.base import Grid
from linvit.backbones.timm.hosts import ACCEPTED, Model, ReplacedAttention
from linvit.errors import UserError
from linvit.registry import Spec


class ReplacedSAMAttention(ReplacedAttention):
    """Replaces SAM's attention of a map (B, H, W, C). Positions relative to the query are for what takes a bias."""

    sources = (vision_transformer_sam.Attention,)
    kept = ReplacedAttention.kept | {"rel_pos_h", "rel_pos_w"}

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        if source.rope is not None:
            raise UserError(f"SAM's attention with rotary positions has no place for a mechanism; {ACCEPTED}")
        side = model.parent(name).window_size  # 0 is the whole map
        super().__init__(source, spec, Grid((side, side) if side else model.patches.grid.size))
        if side:
            self.refuse_stem("SAM")
        biased = source.use_rel_pos and self.mechanism.takes_bias
        self.rel_pos_h = source.rel_pos_h if biased else None
        self.rel_pos_w = source.rel_pos_w if biased else None

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        return self.mix(x.flatten(1, 2), Grid((x.shape[1], x.shape[2]))).view_as(x)

    def position_bias(self, q: Tensor, grid: Grid) -> Tensor | None:
        """The products of each query with the embeddings of its distances in rows and columns, (B, h, N, N)."""
        if self.rel_pos_h is None or self.rel_pos_w is None:
            return None
        heads = self.mechanism.num_heads
        tokens = q.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1)  # (B h, N, d)
        bias: Tensor = vision_transformer_sam.get_decomposed_rel_pos_bias(
            tokens, self.rel_pos_h, self.rel_pos_w, grid.size, grid.size
        )
        return bias.view(-1, heads, *bias.shape[1:])
