"""The patch grid of the images in a timm model, for the layers that timm hands tokens alone."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from linvit.attention.base import Grid
from linvit.errors import UserError
from linvit.image_size import image_size


class PatchGrid:
    """The patch grid of the images that are in a model: a forward pre-hook of its patch embedding.

    timm's blocks hand on tokens without their height and width, so these are noted where they are known.

    Args:
        patch_embed: timm's patch embedding.
        size: The nominal patch grid, (H, W).
        num_prefix: Class and register tokens of the model.
    """

    def __init__(self, patch_embed: Any, size: tuple[int, int], num_prefix: int) -> None:
        self.grid = Grid(size, num_prefix=num_prefix)
        patch_embed.register_forward_pre_hook(self)

    def __call__(self, patch_embed: Any, args: tuple[Tensor, ...]) -> None:
        """Notes the grid of the images (B, C, H, W) that are about to be embedded."""
        height, width = patch_embed.dynamic_feat_size(args[0].shape[-2:])
        self.grid = self.grid._replace(size=(height, width))


def patch_grid(network: Any, img_size: int | Sequence[int]) -> PatchGrid:
    """Makes a model note the patch grid of its images."""
    patch_embed: Any = getattr(network, "patch_embed", None)
    if not hasattr(patch_embed, "dynamic_feat_size"):
        raise UserError(
            f"{type(network).__name__} has no patch embedding that tells the grid of its tokens; take a model such as "
            f"vit_tiny_patch16_224"
        )
    size = getattr(patch_embed, "grid_size", None) or patch_embed.dynamic_feat_size(image_size(img_size))
    return PatchGrid(patch_embed, tuple(size), network.num_prefix_tokens)
