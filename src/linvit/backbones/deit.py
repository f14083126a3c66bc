"""DeiT: a plain vision transformer, with any attention in its blocks.

Papers: Touvron et al. 2021, "Training data-efficient image transformers & distillation through attention"; Dosovitskiy
et al. 2021, "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale" (ViT). The FLatten presets
follow Han et al. 2023: focused attention in every block, no class token, mean pooling. The Hydra preset follows Bolya
et al. 2022: Hydra attention in the last two of twelve blocks, its most accurate setting.
Castling-ViT's have its attention in all blocks, as Han et al. 2023 compare it; its authors published no models.
The Agent presets follow Han et al. 2024 ("Agent Attention"): in all blocks, or in the first four (base). The InLine
presets are those of Han et al. 2024 ("Bridging the Divide"), whose small and base are narrower, for larger images.
CA-DeiT's presets are those of Han et al. 2025: circulant attention, no class token, and convolutions for positions. The
MHLA presets are those of Zhang et al. 2026: MHLA in every block, no class token, mean pooling, and a second norm before
each attention. Their program pads images of 224 to 256 with zeros; here images are of 256. The T5 presets are those of
Li et al. 2026 ("Linearizing Vision Transformers with Test-Time Training"), which are converted from DeiT; the ViT^3
presets those of Han et al. 2026 ("ViT^3: Unlocking Test-Time Training in Vision"), with drop paths of 0, 0.1 and 0.4.

With `window_size`, `decomposed_positions`, `class_token: false` and `final_norm: false` it is ViTDet's (Li et al.
2022, "Exploring Plain Vision Transformer Backbones for Object Detection").

The softmax models equal timm's `VisionTransformer`, including parameter names, for images of their own size. For other
sizes their positions are interpolated as in DeiT's fine-tuning and ViTDet, plain bicubic, in calls and when weights are
loaded; timm antialiases them. The authors of FLatten published no DeiT
code: the presets combine the layout of the nearest descendant with the published attention.
"""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import trunc_normal_
from torch import Tensor, nn

from linvit.attention.base import Grid, Packed
from linvit.attention.ops.functional import SizeOf, resize_table, resize_tokens
from linvit.backbones.base import Backbone
from linvit.backbones.initialise import classifier
from linvit.backbones.packing import pack
from linvit.backbones.stage import run_blocks, specs_and_rates
from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.layers.attention_layer import AttentionLayer
from linvit.layers.block import Block
from linvit.layers.hosting import QKNorm
from linvit.layers.mlp import FeedForward, feed_forward
from linvit.layers.patch_embed import PatchEmbed
from linvit.layers.windows import WindowAttention
from linvit.registry import Spec, preset


class DeiT(Backbone):
    """DeiT, a vision transformer of one resolution, for images of any size and aspect ratio.

    For other image sizes than `img_size` the position embeddings are interpolated (bicubic, as in DeiT's fine-tuning).
    Images of several sizes, a list of (C, H, W), are packed into one row of tokens.

    Args:
        img_size: Side, or (H, W), of the position embeddings; a multiple of `patch_size`.
        attention: One spec for all blocks, or a list with one per block.
        patch_size: Side of a patch.
        embed_dim: Channels C.
        depth: Blocks.
        num_heads: Heads per block.
        pos_embed: Add a learnable embedding of each patch's position.
        cpe: Add conditional positional encodings, a 3 x 3 depthwise convolution before the attention
            of each block.
        input_norm: Add a LayerNorm before every attention, after the block's norm, as in MHLA's models.
        rel_pos_bias: Add a learnable bias of relative positions in every block, for attention that takes one (softmax).
        decomposed_positions: Use ViTDet's bias instead, of rows plus columns, which depends on the query.
        window_size: Side of the windows in which blocks attend, except for four of them, the last of each quarter,
            which attend to the whole map; ViTDet's is 14. null is the whole map in every block.
        final_norm: Apply a final norm, also to every feature; ViTDet has none.
        class_token: Prepend a learnable class token.
        distilled: Add the distillation token after the class token, with its own classifier; the logits are the
            mean of both classifiers'.
        global_pool: Input of the classifier: "token" (the class token) or "avg" (the mean of the patch tokens).
    """

    levels = "blocks"
    packs = True

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
        ffn: FeedForward = "mlp",
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        qk_norm: QKNorm = "none",
        pos_embed: bool = True,
        cpe: bool = False,
        input_norm: bool = False,
        rel_pos_bias: bool = False,
        decomposed_positions: bool = False,
        window_size: int | None = None,
        final_norm: bool = True,
        class_token: bool = True,
        distilled: bool = False,
        global_pool: str = "token",
    ) -> None:
        if distilled and not (class_token and global_pool == "token"):
            raise UserError("distilled: true needs class_token: true and global_pool: token")
        if window_size is not None and (class_token or input_norm):
            raise UserError("window_size is for a network with class_token: false and input_norm: false")
        super().__init__(num_classes, embed_dim, global_pool, num_prefix_tokens=int(class_token) + int(distilled))
        self.embed_dim = embed_dim
        self.patch_size = patch_size
        self.grid = Grid(patch_grid(image_size(img_size), patch_size), num_prefix=self.num_prefix_tokens)

        self.patch_embed = PatchEmbed(in_chans, embed_dim, patch_size, patch_size, norm=False)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if class_token else None
        self.dist_token = nn.Parameter(torch.zeros(1, 1, embed_dim)) if distilled else None
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid.num_queries, embed_dim)) if pos_embed else None
        (specs,), (rates,) = specs_and_rates(attention, drop_path_rate, [depth])
        shared: dict[str, Any] = {"qkv_bias": qkv_bias, "proj_drop": proj_drop, "qk_norm": qk_norm}
        shared["rel_pos_bias"] = "decomposed" if decomposed_positions else rel_pos_bias
        windowed = {**shared, "window": window_size, "shrink": False}
        whole = {-(-i * depth // 4) - 1 for i in range(1, 5)} if window_size is not None else set(range(depth))
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                AttentionLayer(embed_dim, num_heads, self.grid, attention=spec, input_norm=input_norm, **shared)
                if i in whole
                else WindowAttention(embed_dim, num_heads, self.grid, attention=spec, **windowed),
                feed_forward(ffn, embed_dim, int(embed_dim * mlp_ratio)),
                rate,
                norm_eps=1e-6,
                cpe=int(cpe),
            )
            for i, (spec, rate) in enumerate(zip(specs, rates, strict=True))
        )
        levels: list[dict[str, str | int]] = [
            {"module": f"blocks.{i}", "num_chs": embed_dim, "reduction": patch_size} for i in range(depth)
        ]
        self.finalize(nn.LayerNorm(embed_dim, eps=1e-6) if final_norm else nn.Identity(), levels)
        self.head_dist = classifier(embed_dim, num_classes) if distilled else None
        for table in (self.pos_embed, self.cls_token, self.dist_token):
            if table is not None:
                trunc_normal_(table, std=0.02)

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Returns the tokens of images, with position embeddings, and their grid."""
        patch_grid((x.shape[-2], x.shape[-1]), self.patch_size)
        x, size = self.patch_embed(x)
        grid = Grid(size, num_prefix=self.grid.num_prefix)
        prefix = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.dist_token) if token is not None]
        x = torch.cat([*prefix, x], dim=1)
        if self.pos_embed is None:
            return x, grid
        prefixed, patches = self.pos_embed.tensor_split([self.num_prefix_tokens], dim=1)
        positions = torch.cat([prefixed, resize_tokens(patches, self.grid.size, size)], dim=1)
        return x + positions, grid

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        """Returns a checkpoint's positions for the nominal grid (bicubic); see `linvit.Attention.resize_tables`."""
        if self.pos_embed is not None and "pos_embed" in state:
            state["pos_embed"] = resize_table(state["pos_embed"], self.pos_embed, self.grid.size, size_of)
        return state

    def forward_levels(
        self, x: Tensor | Sequence[Tensor], take: Collection[int] = (), stop: int | None = None
    ) -> tuple[Tensor, Grid | Packed, list[tuple[Tensor, Any]]]:
        """Runs images through the first `stop` blocks; see `Backbone.forward_levels`."""
        for images in [x] if isinstance(x, Tensor) else x:
            self.check_channels(images)
        grid: Grid | Packed
        x, grid = self.embed(x) if isinstance(x, Tensor) else pack(self.embed, x)
        found = []
        for i, block in enumerate(self.blocks[:stop]):
            x = run_blocks([block], x, grid, self.grad_checkpointing and self.training)
            if i in take:
                found.append((x, grid))
        return x, grid, found

    def normalise(self, tokens: Tensor, level: int) -> Tensor:
        """Applies the final norm, for the feature of any block."""
        return self.norm(tokens)  # type: ignore[no-any-return]

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Returns logits or pooled features, with a distillation token the mean of both; see `Backbone`."""
        if self.head_dist is None:
            return super().forward_head(x, pre_logits)
        x, distilled = x[:, 0], x[:, 1]
        if pre_logits:
            return (x + distilled) / 2
        return (self.head(x) + self.head_dist(distilled)) / 2  # type: ignore[no-any-return]

    def get_classifier(self) -> Any:
        """Returns the classifier, or both classifiers of a distilled model, as timm does."""
        return self.head if self.head_dist is None else (self.head, self.head_dist)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the classifier, or both, by new ones; see `Backbone.reset_classifier`."""
        super().reset_classifier(num_classes, global_pool)
        if self.head_dist is not None:
            self.head_dist = classifier(self.num_features, num_classes)

    def no_weight_decay(self) -> set[str]:
        """Returns names of parameters without weight decay: position embeddings, prefix tokens, and `Backbone`'s."""
        tokens = {"pos_embed", "cls_token", "dist_token"} & dict(self.named_parameters()).keys()
        return tokens | super().no_weight_decay()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Returns timm's layer groups for layer-wise learning rates, one per block."""
        return {
            "stem": r"^cls_token|dist_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }


def patch_grid(size: tuple[int, int], patch: int) -> tuple[int, int]:
    """Returns the rows and columns of patches of an image.

    Raises:
        UserError: If a side is not a multiple of the patch.
    """
    if size[0] % patch or size[1] % patch:
        down = tuple(max(patch, side // patch * patch) for side in size)
        up = tuple(-(-side // patch) * patch for side in size)
        raise UserError(
            f"image size {size[0]}x{size[1]} is not divisible by patch size {patch}; "
            f"the nearest sizes are {down[0]}x{down[1]} and {up[0]}x{up[1]}"
        )
    return size[0] // patch, size[1] // patch


_mean = partial(DeiT, class_token=False, global_pool="avg")

deit_nano = preset(
    _mean, img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3
)  # linvit's own, for 32x32 images
deit_tiny = preset(DeiT, embed_dim=192, num_heads=3)
deit_small = preset(DeiT, embed_dim=384, num_heads=6)
deit_base = preset(DeiT, embed_dim=768, num_heads=12)
deit_base_384 = preset(deit_base, img_size=384)
hydra_deit_base = preset(deit_base, attention=["softmax"] * 10 + ["hydra"] * 2)
flatten_deit_tiny = preset(_mean, attention="focused", embed_dim=192, num_heads=3)
flatten_deit_small = preset(_mean, attention="focused", embed_dim=384, num_heads=6)

castling_deit_tiny = preset(deit_tiny, attention="linear_angular")
castling_deit_small = preset(deit_small, attention="linear_angular")
castling_deit_base = preset(deit_base, attention="linear_angular")
agent_deit_tiny = preset(deit_tiny, attention="agent")
agent_deit_small = preset(deit_small, attention="agent")
agent_deit_small_448 = preset(agent_deit_small, img_size=448)
agent_deit_base = preset(deit_base, attention=[{"name": "agent", "agents": 81}] * 4 + ["softmax"] * 8)
inline_deit_tiny = preset(DeiT, attention="inline", embed_dim=192, num_heads=6)
inline_deit_small = preset(DeiT, attention="inline", img_size=288, embed_dim=320, num_heads=10)
inline_deit_base = preset(DeiT, attention="inline", img_size=448, embed_dim=384, num_heads=12)

_ca_deit = partial(_mean, attention="circulant", cpe=True, pos_embed=False)
ca_deit_tiny = preset(_ca_deit, embed_dim=192, num_heads=3)
ca_deit_small = preset(_ca_deit, embed_dim=384, num_heads=6)
ca_deit_base = preset(_ca_deit, embed_dim=768, num_heads=12)

_mhla = partial(
    _mean, attention={"name": "mhla", "denominator": "reference"}, img_size=256, qkv_bias=False, input_norm=True
)
mhla_deit_tiny = preset(_mhla, embed_dim=192, num_heads=3)
mhla_deit_small = preset(_mhla, embed_dim=384, num_heads=6)
mhla_deit_base = preset(_mhla, embed_dim=768, num_heads=12)

t5_tiny = preset(_mean, attention="t5", embed_dim=192, num_heads=3)
t5_small = preset(_mean, attention="t5", embed_dim=384, num_heads=6)
t5_base = preset(_mean, attention="t5", embed_dim=512, depth=24, num_heads=8)

_vittt = partial(_mean, attention="vittt", pos_embed=False, cpe=True)
vittt_tiny = preset(_vittt, embed_dim=192, num_heads=6)
vittt_small = preset(_vittt, embed_dim=384, num_heads=6)
vittt_base = preset(_vittt, embed_dim=768, num_heads=12)
