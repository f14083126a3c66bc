"""Builds networks for dense prediction: a backbone, linvit's or timm's, and a head for its feature maps."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from timm.layers import Format
from torch import Tensor, nn

from linvit.backbones.base import Backbone
from linvit.backbones.create import create_backbone, dense_options, image_channels
from linvit.errors import UserError
from linvit.heads.base import Head
from linvit.heads.neck import REDUCTIONS, SimpleFeaturePyramid, check_reduction
from linvit.registry import Spec, backbones, heads
from linvit.registry.signatures import parameters_of, takes


def create_head(
    spec: Spec, *, channels: Sequence[int], reductions: Sequence[int], num_classes: int, **options: Any
) -> Head:
    """Builds the head of a spec; `create_segmentor` and `create_detector` also build its backbone.

    Args:
        spec: A name, or a mapping with `name` and options of the head.
        channels: Channels of each feature map (B, C, H, W) of the backbone, the largest map first.
        reductions: Image side over map side of each map.
        num_classes: Classes.
        options: Further options of the head.

    Raises:
        UserError: If the name does not exist, or the head does not accept an option or these maps.

    Example:
        >>> linvit.create_head("fcn", channels=[64, 128], reductions=[4, 8], num_classes=150)
    """
    made = heads.create(spec, channels=channels, reductions=reductions, num_classes=num_classes, **options)
    return cast("Head", made)


def backbone_and_head(
    task: str,
    backbone: Spec,
    head: Spec,
    num_classes: int,
    attention: Spec | Sequence[Spec] | None,
    img_size: int | Sequence[int],
    drop_path_rate: float,
    in_chans: int = 3,
) -> tuple[nn.Module, Any, SimpleFeaturePyramid | None]:
    """Builds a backbone in its form for dense prediction, a head for its maps, and a neck if needed.

    A neck is needed for a plain transformer with a head that needs a pyramid; it replaces a head's own pyramid (`fpn`).
    """
    head_name, head_options = heads.parse(head)
    head_class: Any = heads.get(head_name)
    if head_class.task != task:
        raise UserError(
            f"head '{head_name}' is for {head_class.task}, not for {task}. Create a network with it by "
            f"linvit.{head_class.maker}, or name a head of {task}: {', '.join(heads_of(task))}"
        )
    name, options = backbones.parse(backbone)
    spec = {"name": name, **dense_options(name), **options}
    shared: dict[str, Any] = {"img_size": img_size, "drop_path_rate": drop_path_rate, **image_channels(in_chans)}
    context = {key: value for key, value in shared.items() if key not in options}
    network = create_backbone(spec, attention, num_classes=0, **context)
    indices, channels, reductions = pyramid(network, head_class)
    drop_unused(network, indices)
    made: dict[str, Any] = {"img_size": img_size} if takes(head_class, "img_size") else {}
    neck = None
    if needs_neck(head_class, reductions):
        neck_options = {}
        if head_class.fpn_width:
            neck_options["width"] = {**parameters_of(head_class), **head_options}[head_class.fpn_width]
            made |= {} if "fpn" in head_options else {"fpn": False}
        levels = [REDUCTIONS[i] for i in head_class.levels(REDUCTIONS)]
        neck = SimpleFeaturePyramid(channels[-1], reductions[-1], levels, **neck_options)
        channels, reductions = neck.channels, neck.reductions
    built = heads.create(head, channels=channels, reductions=reductions, num_classes=num_classes, **made)
    return network, built, neck


class DenseNetwork(nn.Module):
    """Backbone and head that fit together, with a neck between them where the head needs a pyramid from one map."""

    def __init__(self, backbone: nn.Module, head: Any, neck: SimpleFeaturePyramid | None = None) -> None:
        super().__init__()
        self.pyramid = pyramid(backbone, head)
        made_for = head.channels, head.reductions
        given = self.pyramid[1:] if neck is None else (neck.channels, neck.reductions)
        if made_for != given:
            raise UserError(
                f"{type(head).__name__} was made for channels and reductions {made_for}, but {type(backbone).__name__} "
                f"gives it {given}. Create both by linvit.{head.maker}"
            )
        self.backbone = backbone
        self.neck = neck
        self.head = head
        self.num_classes: int = head.num_classes

    def feature_maps(self, images: Tensor) -> list[Tensor]:
        """Returns the input of the head for images (B, 3, H, W): maps (B, C, H', W')."""
        return self.through_neck(feature_maps(self.backbone, images, self.pyramid.indices))

    def through_neck(self, maps: list[Tensor]) -> list[Tensor]:
        """Returns the maps of the backbone, or the pyramid that the neck makes from them."""
        return maps if self.neck is None else self.neck(maps)


def heads_of(task: str) -> list[str]:
    """Returns the names of linvit's heads of a task."""
    own = [name for name, owners in heads.entries().items() if owners[0].owner == "linvit"]
    return [name for name in own if getattr(heads.get(name), "task", None) == task]


class Pyramid(NamedTuple):
    """Selection of feature maps of a backbone for a head."""

    indices: tuple[int, ...]
    channels: tuple[int, ...]
    reductions: tuple[int, ...]


def needs_neck(head: Any, reductions: Sequence[int]) -> bool:
    """Returns True if a head needs a pyramid and all features of the backbone have one size (plain transformers)."""
    return head.needs_pyramid and len(set(reductions)) == 1


def pyramid(backbone: nn.Module, head: Any) -> Pyramid:
    """Returns the features of a backbone that a head (or head class) uses, and the neck between them."""
    levels = feature_levels(backbone)
    reductions = [level["reduction"] for level in levels]
    if needs_neck(head, reductions):
        others = [name for name in heads_of(head.task) if not getattr(heads.get(name), "needs_pyramid", True)]
        check_reduction(reductions[0], type(backbone).__name__, ", ".join(others))
        indices = tuple(sorted({-(-i * len(levels) // head.plain_maps) - 1 for i in range(1, head.plain_maps + 1)}))
    else:
        indices = tuple(head.levels(reductions)) if levels else ()
    if not indices:
        had = f"has features at reductions {reductions}, none usable by the head" if levels else "has no features"
        raise UserError(
            f"{type(backbone).__name__} {had}. Use a backbone with feature maps, such as swin_tiny or "
            f"{{name: timm, model: resnet50}}"
        )
    chosen = [levels[i] for i in indices]
    return Pyramid(indices, *(tuple(level[key] for level in chosen) for key in ("num_chs", "reduction")))


def feature_levels(backbone: Any) -> list[dict[str, Any]]:
    """Returns channels and reduction of each feature, under timm's names `num_chs` and `reduction`."""
    info = getattr(backbone, "feature_info", [])
    return list(info) if isinstance(info, list) else list(info.get_dicts())  # timm's FeatureInfo


def feature_maps(backbone: Any, images: Tensor, indices: Sequence[int]) -> list[Tensor]:
    """Returns chosen features (B, C, H', W') of images (B, 3, H, W), with their norms."""
    if hasattr(backbone, "forward_intermediates"):
        found: list[Tensor] = backbone.forward_intermediates(
            images, indices=list(indices), norm=has_norms(backbone), intermediates_only=True
        )
        return found
    features = backbone(images)  # timm's wrappers for features_only=True
    chosen = [features[i] for i in indices]
    last = getattr(backbone, "output_fmt", Format.NCHW) == Format.NHWC
    return [feature.permute(0, 3, 1, 2) for feature in chosen] if last else chosen


def has_norms(backbone: Any) -> bool:
    """Returns True if features have a norm: linvit's, and those of timm's plain transformers; its others refuse it."""
    plain = len({level["reduction"] for level in feature_levels(backbone)}) == 1
    return isinstance(backbone, Backbone) or (plain and hasattr(backbone, "norm"))


def drop_unused(backbone: Any, indices: Sequence[int]) -> None:
    """Deletes modules of a backbone that its features at `indices` do not use: they would get no gradient."""
    if hasattr(backbone, "prune_intermediate_layers"):
        idle = not has_norms(backbone)
        if not idle:
            trained = [parameter.requires_grad for parameter in backbone.norm.parameters()]
            idle = bool(trained) and not any(trained)  # unused, but part of checkpoints
        backbone.prune_intermediate_layers(list(indices), prune_norm=idle, prune_head=True)
