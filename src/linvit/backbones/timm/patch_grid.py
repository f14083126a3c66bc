"""The patch grid of the images in a timm model, whose attention layers get tokens without height and width."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from linvit.attention.base import Grid
from linvit.errors import UserError
from linvit.image_size import image_size

ACCEPTED = "take timm's ViT, DeiT, BEiT, EVA without rotary positions, PVTv2 or Swin, such as vit_tiny_patch16_224"
"""The models of timm whose attention can be replaced, for messages."""


class PatchGrid:
    """Records the patch grid of a model's images, as a forward pre-hook of its patch embedding."""

    def __init__(self, patch_embed: Any, size: tuple[int, int], num_prefix: int) -> None:
        self.grid = Grid(size, num_prefix=num_prefix)
        patch_embed.register_forward_pre_hook(self)

    def __call__(self, patch_embed: Any, args: tuple[Tensor, ...]) -> None:
        """Records the grid of images (B, C, H, W) before they are embedded."""
        height, width = patch_embed.dynamic_feat_size(args[0].shape[-2:])
        self.grid = self.grid._replace(size=(height, width))


def patch_grid(network: Any, img_size: int | Sequence[int]) -> PatchGrid:
    """Registers a `PatchGrid` on a model."""
    patch_embed: Any = getattr(network, "patch_embed", None)
    if not hasattr(patch_embed, "dynamic_feat_size"):
        raise UserError(
            f"{type(network).__name__} has no patch embedding that tells the grid of its tokens; {ACCEPTED}"
        )
    size = getattr(patch_embed, "grid_size", None) or patch_embed.dynamic_feat_size(image_size(img_size))
    return PatchGrid(patch_embed, tuple(size), network.num_prefix_tokens)
