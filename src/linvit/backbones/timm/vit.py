"""Replaces attention among all tokens of an image, prefix first."""

from typing import Any

import torch
from timm.layers import Attention, AttentionRope, PatchDropout, PatchDropoutWithIndices
from timm.models import beit, cait, crossvit, eva, pit
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.attention.softmax import SoftmaxAttention
from linvit.backbones.timm.hosts import Model, NaFlexGrid, PatchGrid, ReplacedAttention
from linvit.errors import UserError
from linvit.registry import Spec


class ReplacedViTAttention(ReplacedAttention):
    """Replaces the attention of ViT, DeiT, BEiT, EVA, DINOv3, NaFlex and the like, among all tokens, prefix first.

    If the model has rotary positions, it rotates q and k by its own tables before the mechanism gets them. With its
    patch dropout the remaining patches form no plane, so mechanisms that use the grid raise an error. In a batch
    of several sizes, keys that pad shorter images are masked, or, if the mechanism cannot do that or uses
    the grid, it is called per image.
    """

    sources = (Attention, AttentionRope, beit.Attention, eva.EvaAttention)
    kept = ReplacedAttention.kept | {"relative_position_bias_table", "norm"}

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        self.patches = self.patches_of(model, name)
        super().__init__(source, spec, self.patches.grid)
        self.drops_patches = isinstance(
            getattr(model.network, "patch_drop", None), PatchDropout | PatchDropoutWithIndices
        )
        what, mechanism = type(model.network).__name__, type(self.mechanism).__name__
        self.norm = getattr(source, "norm", nn.Identity())  # of the mechanism's output
        if not isinstance(self.norm, nn.Identity) and self.mechanism.out_dim != self.mechanism.dim:
            raise UserError(
                f"{what} norms the {self.mechanism.dim} channels that its attention mixes, but {mechanism} outputs "
                f"{self.mechanism.out_dim}. Remove the option that widens it"
            )
        if self.drops_patches and self.looks_at_places:
            raise UserError(
                f"{what} drops patches in training, and {mechanism} needs the whole plane of them (equivariant is "
                f"False). Create the model with patch_drop_rate=0"
            )
        if getattr(model.network, "rope", None) is not None:
            self.refuse_second_rotation(what)

    def patches_of(self, model: Model, name: str) -> PatchGrid:
        """Returns the recorder of a layer's grid: for PiT that of a stage, for CrossViT that of a branch."""
        network: Any = model.network
        if isinstance(network, pit.PoolingVisionTransformer):
            stage = int(name.split(".")[1])
            height, width = (-(-side // 2**stage) for side in network.pos_embed.shape[2:])
            source: Any = network.transformers[stage].pool if stage else network.patch_embed
            return model.map_from(source, Grid((height, width), num_prefix=network.num_tokens))
        if isinstance(network, crossvit.CrossVit):
            embed: Any = network.patch_embed[int(name.split(".")[3])]
            height, width = (side // patch for side, patch in zip(embed.img_size, embed.patch_size, strict=True))
            return model.map_from(embed.proj, Grid((height, width), num_prefix=1))
        return model.patches

    def project(self, out: Tensor, x: Tensor) -> Tensor:
        """Projects like any layer, after the norm of the mechanism's output."""
        return super().project(self.norm(out), x)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Tensor | None = None,
        shared_rel_pos_bias: Tensor | None = None,
    ) -> Tensor:
        """Maps (B, N, C) to (B, N, C). A mask of pairs of tokens is an error unless the mechanism accepts a bias."""
        grid, mask = self.patches.grid, None
        if attn_mask is not None and attn_mask.shape[1:-1] == (1, 1):  # of keys only, (B, 1, 1, N)
            mask = (attn_mask if attn_mask.dtype == torch.bool else attn_mask >= 0)[:, 0, 0]
            attn_mask = None
        if is_causal or (attn_mask is not None and not self.mechanism.host.accepts_bias):
            raise UserError(
                f"{type(self.mechanism).__name__} in a timm model takes no {'causal ' if is_causal else ''}mask"
            )
        placed = self.looks_at_places and isinstance(self.patches, NaFlexGrid)
        if mask is not None and (placed or not self.mechanism.takes_mask):
            return self.image_by_image(x, mask, rope)
        if self.drops_patches and self.training:
            grid = Grid((1, x.shape[1] - grid.num_prefix), num_prefix=grid.num_prefix)
        if attn_mask is not None:
            if attn_mask.dtype == torch.bool:  # True for tokens that take part
                attn_mask = torch.zeros_like(attn_mask, dtype=x.dtype).masked_fill(~attn_mask, -torch.inf)
            attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]  # (B or 1, h or 1, N, N)
        bias = shared_rel_pos_bias if attn_mask is None else attn_mask
        return self.mix(x, grid, bias=bias, rope=rope, mask=mask)

    def image_by_image(self, x: Tensor, mask: Tensor, rope: Tensor | None) -> Tensor:
        """Mixes the tokens (B, N, C) of each image of a batch of several sizes on its own grid."""
        prefix, sizes = self.patches.grid.num_prefix, getattr(self.patches, "sizes", ())
        grids = [Grid(size, num_prefix=prefix) for size in sizes]
        dropped = self.drops_patches and self.training
        if dropped or mask.sum(1).tolist() != [grid.num_queries for grid in grids]:
            raise UserError(
                f"{type(self.mechanism).__name__} cannot leave tokens out by a mask: it needs whole images. Pass "
                f"images of one size, or of several to timm's NaFlexVit with patch_drop_rate=0"
            )
        done = []
        for i, grid in enumerate(grids):
            turn = None if rope is None else rope[i : i + 1, ..., : grid.num_queries - prefix, :]
            out = self.mix(x[i : i + 1, : grid.num_queries], grid, rope=turn)
            done.append(F.pad(out, (0, 0, 0, x.shape[1] - grid.num_queries)))
        return torch.cat(done)


class ReplacedCaiTAttention(ReplacedAttention):
    """Replaces CaiT's attention among patches, without the mixing of heads before and after softmax."""

    sources = (cait.TalkingHeadAttn,)
    kept = ReplacedAttention.kept | {"proj_l", "proj_w"}

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        super().__init__(source, spec, Grid(model.patches.grid.size))
        if type(self.mechanism) is SoftmaxAttention:
            raise UserError(
                "CaiT mixes the heads of softmax's logits and maps, so softmax alone is not its attention; leave its "
                "own in place (null), or take another attention"
            )
        self.patches = model.patches

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        return self.mix(x, Grid(self.patches.grid.size))
