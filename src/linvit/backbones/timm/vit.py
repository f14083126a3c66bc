"""Attention among all tokens of an image, prefix first."""

from typing import Any

import torch
from timm.layers import Attention, AttentionRope, PatchDropout, PatchDropoutWithIndices
from timm.models import beit, eva
from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.backbones.timm.hosts import Model, ReplacedAttention
from linvit.errors import UserError
from linvit.registry import Spec


class ReplacedViTAttention(ReplacedAttention):
    """Replaces the attention of ViT, DeiT, BEiT, EVA, DINOv3 and their like, among all tokens, prefix first.

    Where the model has rotary positions, it turns q and k by its own tables before the mechanism gets them. Under its
    patch dropout the patches that are left are in no plane, so mechanisms that look at the grid are refused.
    """

    sources = (Attention, AttentionRope, beit.Attention, eva.EvaAttention)
    kept = ReplacedAttention.kept | {"relative_position_bias_table", "norm"}

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        super().__init__(source, spec, model.patches.grid)
        self.patches = model.patches
        self.drops_patches = isinstance(
            getattr(model.network, "patch_drop", None), PatchDropout | PatchDropoutWithIndices
        )
        what, mechanism = type(model.network).__name__, type(self.mechanism).__name__
        if not isinstance(getattr(source, "norm", nn.Identity()), nn.Identity):
            self.norm = source.norm
            if self.mechanism.out_dim != self.mechanism.dim:
                raise UserError(
                    f"{what} norms the {self.mechanism.dim} channels that its attention mixes, and {mechanism} makes "
                    f"{self.mechanism.out_dim} of them. Leave out what widens it"
                )
        if self.drops_patches and not (self.mechanism.equivariant and self.stem is None):
            raise UserError(
                f"{what} drops patches in training, and {mechanism} needs the whole plane of them (equivariant is "
                f"False). Create the model with patch_drop_rate=0"
            )
        if getattr(model.network, "rope", None) is None:
            return
        if self.mechanism.rotary:
            raise UserError(
                f"{what} turns q and k by its rotary positions, and {mechanism} would turn them once more. Set its "
                f"option rotary to false (none in mlla)"
            )
        if "q" not in self.projections:
            raise UserError(f"{what} turns queries by its rotary positions, and {mechanism} projects none")

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Tensor | None = None,
        shared_rel_pos_bias: Tensor | None = None,
    ) -> Tensor:
        """(B, N, C) -> (B, N, C). A mask is refused unless the mechanism takes a bias."""
        if is_causal or (attn_mask is not None and not self.mechanism.takes_bias):
            raise UserError(
                f"{type(self.mechanism).__name__} in a timm model takes no {'causal ' if is_causal else ''}mask"
            )
        grid = self.patches.grid
        if self.drops_patches and self.training:
            grid = Grid((1, x.shape[1] - grid.num_prefix), num_prefix=grid.num_prefix)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:  # what takes part
                attn_mask = torch.zeros_like(attn_mask, dtype=x.dtype).masked_fill(~attn_mask, -torch.inf)
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]  # (B or 1, h or 1, N, N)
        return self.mix(x, grid, shared_rel_pos_bias if attn_mask is None else attn_mask, rope)
