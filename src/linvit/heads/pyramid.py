"""The feature maps of any backbone, linvit's or timm's, as a head takes them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from timm.layers import Format
from torch import Tensor, nn

from linvit.backbones.base import Backbone
from linvit.errors import UserError


class Pyramid(NamedTuple):
    """Which feature maps of a backbone a head gets."""

    indices: tuple[int, ...]
    channels: tuple[int, ...]
    reductions: tuple[int, ...]


def pyramid(backbone: nn.Module, choose: Callable[[Sequence[int]], Sequence[int]]) -> Pyramid:
    """Returns what a head gets of the features of a backbone: `choose` has positions, given all reductions."""
    levels = feature_levels(backbone)
    reductions = [level["reduction"] for level in levels]
    indices = tuple(choose(reductions)) if levels else ()
    if not indices:
        had = f"has features at reductions {reductions}, none that the head can use" if levels else "has no features"
        raise UserError(
            f"{type(backbone).__name__} {had}. Take a backbone with feature maps, such as swin_tiny or "
            f"{{name: timm, model: resnet50}}"
        )
    chosen = [levels[i] for i in indices]
    return Pyramid(indices, *(tuple(level[key] for level in chosen) for key in ("num_chs", "reduction")))


def feature_levels(backbone: Any) -> list[dict[str, Any]]:
    """Returns channels and reduction of each feature, under timm's names `num_chs` and `reduction`."""
    info = getattr(backbone, "feature_info", [])
    return list(info) if isinstance(info, list) else list(info.get_dicts())  # timm's FeatureInfo


def feature_maps(backbone: Any, images: Tensor, indices: Sequence[int]) -> list[Tensor]:
    """Returns chosen features (B, C, H', W') of images (B, 3, H, W), in linvit's backbones with the norms they have."""
    if hasattr(backbone, "forward_intermediates"):
        own = isinstance(backbone, Backbone)  # some of timm's have no norm of features, and refuse to apply it
        found: list[Tensor] = backbone.forward_intermediates(
            images, indices=list(indices), norm=own, intermediates_only=True
        )
        return found
    features = backbone(images)  # timm's wrappers for features_only=True
    chosen = [features[i] for i in indices]
    last = getattr(backbone, "output_fmt", Format.NCHW) == Format.NHWC
    return [feature.permute(0, 3, 1, 2) for feature in chosen] if last else chosen


def drop_unused(backbone: Any, indices: Sequence[int]) -> None:
    """Drops the modules of a backbone that its features at `indices` do not need: they would get no gradient."""
    if hasattr(backbone, "prune_intermediate_layers"):
        idle = True
        if isinstance(backbone, Backbone):
            trained = [parameter.requires_grad for parameter in backbone.norm.parameters()]
            idle = bool(trained) and not any(trained)  # it does nothing, and checkpoints contain it
        backbone.prune_intermediate_layers(list(indices), prune_norm=idle, prune_head=True)
