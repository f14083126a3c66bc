"""What every backbone shares: timm's contract, the distribution of attention specs over blocks, initialisation."""

from collections.abc import Mapping, Sequence

import timm.layers
from torch import Tensor, nn

from linvit.attention.base import Attention
from linvit.errors import UserError
from linvit.registry import Spec


class Backbone(nn.Module):
    """Base of linvit's own backbones: timm's contract, unrenamed.

    A subclass sets `num_classes`, `num_features`, `head_hidden_size`, `feature_info` and `head`, and supplies
    `forward_features`, `forward_head`, `forward_intermediates` and `prune_intermediate_layers`.
    """

    num_classes: int
    num_features: int
    head_hidden_size: int
    feature_info: list[dict[str, str | int]]
    head: nn.Module
    global_pool: str
    grad_checkpointing: bool = False

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) to the last, normalised feature."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The feature to logits (B, num_classes), or to what goes into the classifier if `pre_logits`."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) to logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def check_pool(self, global_pool: str) -> None:
        """Raises a `UserError` if the backbone cannot pool its features that way."""
        raise NotImplementedError

    def get_classifier(self) -> nn.Module:
        """The classifier."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the classifier by a fresh one; 0 classes means features (`nn.Identity`).

        Args:
            num_classes: Classes.
            global_pool: Another pooling, of those that the constructor allows; None keeps the present one.
        """
        if global_pool is not None:
            self.check_pool(global_pool)
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()
        init_vit(self.head)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Trades time for memory: activations inside a block are computed again in the backward pass."""
        self.grad_checkpointing = enable


def specs_per_block(attention: Spec | Sequence[Spec], depths: Sequence[int]) -> list[Spec]:
    """One attention spec per block from one for all, one per stage, or one per block.

    Args:
        attention: A spec or a list of specs.
        depths: Blocks per stage.

    Raises:
        UserError: If a list fits neither the stages nor the blocks.
    """
    total = sum(depths)
    if isinstance(attention, str | Mapping) or not isinstance(attention, Sequence):
        return [attention] * total
    if len(attention) == total:
        return list(attention)
    if len(attention) == len(depths):
        return [spec for spec, depth in zip(attention, depths, strict=True) for _ in range(depth)]
    raise UserError(
        f"attention lists {len(attention)} specs, but this backbone has {total} block(s) in {len(depths)} stage(s). "
        f"Give one spec for all, {len(depths)} (one per stage), or {total} (one per block)"
    )


def init_vit(module: nn.Module) -> None:
    """Initialises Linear and LayerNorm as vision transformers do; a mechanism keeps its own initial values."""
    if isinstance(module, Attention):
        return
    if isinstance(module, nn.Linear):
        timm.layers.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    for child in module.children():
        init_vit(child)


def feature_indices(count: int, indices: int | Sequence[int] | None) -> list[int]:
    """Which of `count` features are meant, as timm counts: None is all, n the last n, a list may count from the end."""
    if indices is None:
        return list(range(count))
    if isinstance(indices, int):
        indices = range(-indices, 0)
    if not indices or not all(-count <= index < count for index in indices):
        raise UserError(
            f"feature indices {list(indices)} do not fit {count} features; allowed: {-count} to {count - 1}"
        )
    return [index % count for index in indices]


def patch_grid(size: tuple[int, int], patch: int) -> tuple[int, int]:
    """Patches per side of an image.

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
