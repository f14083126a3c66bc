"""Attention of LeViT, with BatchNorm behind its projections and keys narrower than the values."""

from types import SimpleNamespace
from typing import Any

from timm.models import levit
from torch import Tensor

from linvit.attention.base import Grid
from linvit.backbones.timm.hosts import Model, ReplacedAttention
from linvit.backbones.timm.swin import ReplacedTinyViTAttention
from linvit.errors import UserError
from linvit.registry import Spec


class ReplacedLeViTAttention(ReplacedTinyViTAttention):
    """Replaces LeViT's attention within a stage; the attention that halves the map between two stages stays."""

    sources = (levit.Attention,)
    kept = ReplacedAttention.kept | {"attention_biases"}
    init_non_persistent_buffers: Any = levit.Attention._init_buffers
    _compute_attention_bias_idxs = levit.Attention._compute_attention_bias_idxs

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        if source.use_conv:
            raise UserError("timm's levit_conv cannot take another attention; take levit, which is the same by layers")
        linear = SimpleNamespace(
            qkv=source.qkv.linear, proj=source.proj.ln.linear, num_heads=source.num_heads, key_dim=source.key_dim
        )
        ReplacedAttention.__init__(self, linear, spec, Grid(tuple(source.resolution)))
        if self.projections != "qkv":
            raise UserError(
                f"LeViT's projections have one BatchNorm for q, k and v, and {type(self.mechanism).__name__} projects "
                f"'{self.projections}'. Take another attention for it"
            )
        self.keep_biases(source)
        source.qkv.linear, source.proj.ln.linear = self.qkv, self.proj
        self.qkv, self.proj = source.qkv, source.proj

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        return self.mix(x, self.mechanism.grid)
