"""Attention among all tokens of an image, prefix first."""

from typing import Any

from timm.layers import Attention, AttentionRope
from timm.models import beit, eva
from torch import Tensor

from linvit.backbones.timm.hosts import Model, ReplacedAttention
from linvit.errors import UserError
from linvit.registry import Spec


class ReplacedViTAttention(ReplacedAttention):
    """Replaces the attention of ViT, DeiT, BEiT and EVA, which is among all tokens, prefix first."""

    sources = (Attention, AttentionRope, beit.Attention, eva.EvaAttention)
    kept = ReplacedAttention.kept | {"relative_position_bias_table"}

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        super().__init__(source, spec, model.patches.grid)
        self.patches = model.patches

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Tensor | None = None,
        shared_rel_pos_bias: Tensor | None = None,
    ) -> Tensor:
        """(B, N, C) -> (B, N, C). A mask is refused unless the mechanism takes a bias."""
        if is_causal or rope is not None or (attn_mask is not None and not self.mechanism.takes_bias):
            raise UserError(f"{type(self.mechanism).__name__} in a timm model takes no mask and no rotary positions")
        return self.mix(x, self.patches.grid, shared_rel_pos_bias if attn_mask is None else attn_mask)
