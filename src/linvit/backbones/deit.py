"""DeiT: a plain vision transformer, with any attention in its blocks.

Papers: Dosovitskiy et al. 2021 (ViT); Touvron et al. 2021, "Training data-efficient image transformers". The FLatten
presets follow Han et al. 2023: focused attention in every block, no class token, mean pooling.

The softmax models equal timm's `VisionTransformer`, parameter names included. The authors of FLatten published no DeiT
code: the presets combine the layout of the nearest descendant with the published attention.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import DropPath, Mlp, resample_abs_pos_embed, trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from linvit.attention.base import Grid
from linvit.backbones.base import Backbone, feature_indices, init_vit, patch_grid, specs_per_block
from linvit.errors import UserError, check_choice
from linvit.image_size import image_size
from linvit.layers.attention_layer import AttentionLayer
from linvit.registry import Spec


class PatchEmbed(nn.Module):
    """Non-overlapping patches to tokens, without a norm: (B, in_chans, H, W) -> (B, H/p * W/p, C)."""

    def __init__(self, in_chans: int, embed_dim: int, patch_size: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Tokens and their patch grid."""
        size = patch_grid((x.shape[-2], x.shape[-1]), self.patch_size)
        return self.proj(x).flatten(2).mT, size


class Block(nn.Module):
    """Pre-norm block: `x + attn(norm1 x)`, then `x + mlp(norm2 x)`, each under stochastic depth."""

    def __init__(
        self, dim: int, num_heads: int, grid: Grid, attention: Spec, mlp_ratio: float, qkv_bias: bool, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = AttentionLayer(dim, num_heads, grid, attention=attention, qkv_bias=qkv_bias)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        x = x + self.drop_path1(self.attn(self.norm1(x), grid))
        return x + self.drop_path2(self.mlp(self.norm2(x)))  # type: ignore[no-any-return]


class DeiT(Backbone):
    """Vision transformer of one resolution, on images of any size and aspect.

    Another image size than `img_size` is met by bicubic interpolation of the position embeddings.

    Args:
        in_chans: Image channels.
        num_classes: Classes; 0 for features.
        img_size: Side, or (H, W), that the position embeddings are made for; a multiple of `patch_size`.
        attention: One spec for all blocks, or a list with one per block.
        drop_path_rate: Stochastic depth of the last block; linear from 0 at the first.
        patch_size: Side of a patch.
        embed_dim: Channels C.
        depth: Blocks.
        num_heads: Heads per block.
        mlp_ratio: Hidden width of the MLP over C.
        qkv_bias: Bias in the q, k, v projections.
        class_token: Prepend a learnable class token.
        global_pool: What goes to the classifier: "token" (the class token) or "avg" (the mean of the patch tokens).
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        img_size: int | Sequence[int] = 224,
        attention: Spec | Sequence[Spec] = "softmax",
        drop_path_rate: float = 0.0,
        patch_size: int = 16,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        class_token: bool = True,
        global_pool: str = "token",
    ) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.global_pool = global_pool
        self.num_prefix_tokens = int(class_token)
        self.check_pool(global_pool)
        self.grid = Grid(patch_grid(image_size(img_size), patch_size), num_prefix=self.num_prefix_tokens)

        self.patch_embed = PatchEmbed(in_chans, embed_dim, patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid.num_queries, embed_dim))
        rates = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        specs = specs_per_block(attention, [depth])
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, self.grid, spec, mlp_ratio, qkv_bias, rate)
            for spec, rate in zip(specs, rates, strict=True)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes > 0 else nn.Identity()
        self.feature_info = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": patch_size} for i in range(depth)
        ]

        init_vit(self)
        trunc_normal_(self.pos_embed, std=0.02)
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)

    def check_pool(self, global_pool: str) -> None:
        """Raises a `UserError` unless the pooling is known and, for "token", there is a class token."""
        check_choice("global_pool", global_pool, ["token", "avg"])
        if global_pool == "token" and not self.num_prefix_tokens:
            raise UserError("global_pool 'token' needs the class token; set class_token: true or global_pool: avg")

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Images to tokens with positions, and their grid."""
        x, size = self.patch_embed(x)
        grid = self.grid._replace(size=size)
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        positions = self.pos_embed
        if size != self.grid.size:
            positions = resample_abs_pos_embed(
                positions, list(size), list(self.grid.size), num_prefix_tokens=self.num_prefix_tokens
            )
        return x + positions, grid

    def run_block(self, block: nn.Module, x: Tensor, grid: Grid) -> Tensor:
        """One block, checkpointed while training if asked for."""
        if self.grad_checkpointing and self.training:
            return checkpoint(block, x, grid, use_reentrant=False)  # type: ignore[no-any-return]
        return block(x, grid)  # type: ignore[no-any-return]

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) to normalised tokens (B, N, C)."""
        x, grid = self.embed(x)
        for block in self.blocks:
            x = self.run_block(block, x, grid)
        return self.norm(x)  # type: ignore[no-any-return]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Normalised tokens (B, N, C) to logits (B, num_classes), or to the pooled feature (B, C) if `pre_logits`."""
        x = x[:, 0] if self.global_pool == "token" else x[:, self.num_prefix_tokens :].mean(1)
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Features of chosen blocks, as timm's method of this name.

        Args:
            x: Images (B, in_chans, H, W).
            indices: Which blocks: a list, the last n, or None for all.
            return_prefix_tokens: Return (feature, prefix tokens) pairs.
            norm: Apply the final norm to each feature.
            stop_early: Stop after the last chosen block.
            output_fmt: "NCHW" (B, C, H/p, W/p) or "NLC" (B, H/p * W/p, C).
            intermediates_only: Return the list alone, without the final feature.
        """
        check_choice("output_fmt", output_fmt, ["NCHW", "NLC"])
        take = feature_indices(len(self.blocks), indices)
        x, grid = self.embed(x)
        features: list[Any] = []
        for i, block in enumerate(self.blocks[: max(take) + 1] if stop_early else self.blocks):
            x = self.run_block(block, x, grid)
            if i in take:
                tokens = self.norm(x) if norm else x
                prefix, patches = tokens[:, : grid.num_prefix], tokens[:, grid.num_prefix :]
                feature = patches.mT.unflatten(2, grid.size) if output_fmt == "NCHW" else patches
                features.append((feature, prefix) if return_prefix_tokens else feature)
        return features if intermediates_only else (self.norm(x), features)

    def prune_intermediate_layers(
        self, indices: int | list[int] | None = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops what features at `indices` do not need; returns the indices of the features that stay."""
        take = feature_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: max(take) + 1]
        if prune_norm:
            self.norm = nn.Identity()  # type: ignore[assignment]
        if prune_head:
            self.reset_classifier(0)
        return take

    def no_weight_decay(self) -> set[str]:
        """Parameters of more than one dimension that are not decayed."""
        return {"pos_embed", "cls_token"}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layer groups for layer-wise learning-rate decay."""
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }


_mean = partial(DeiT, class_token=False, global_pool="avg")

deit_nano = partial(_mean, img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3)  # ours, for 32x32 images
deit_tiny = partial(DeiT, embed_dim=192, num_heads=3)
deit_small = partial(DeiT, embed_dim=384, num_heads=6)
deit_base = partial(DeiT, embed_dim=768, num_heads=12)
flatten_deit_tiny = partial(_mean, attention="focused", embed_dim=192, num_heads=3)
flatten_deit_small = partial(_mean, attention="focused", embed_dim=384, num_heads=6)
