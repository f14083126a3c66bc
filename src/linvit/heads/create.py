"""Builds the backbone and the head of a network for dense prediction, which fit together."""

from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from linvit.backbones.create import create_backbone, dense_options, image_channels
from linvit.errors import UserError
from linvit.heads.base import Head
from linvit.heads.pyramid import drop_unused, pyramid
from linvit.registry import Spec, backbones, heads
from linvit.signatures import takes


def create_head(
    spec: Spec, *, channels: Sequence[int], reductions: Sequence[int], num_classes: int, **options: Any
) -> Head:
    """Builds the head that a spec describes; `create_segmentor` and `create_detector` build its backbone, too.

    Args:
        spec: A name, or a mapping with `name` and options of the head.
        channels: Of each feature map (B, C, H, W) of the backbone, the largest map first.
        reductions: How many pixels of the image a pixel of each map is wide.
        num_classes: Classes.
        options: Further options of the head.

    Raises:
        UserError: If there is no such name, or it does not take an option or these maps.

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
) -> tuple[nn.Module, Any]:
    """Builds a backbone in the form of its dense models, and a head for the feature maps that the head wants."""
    head_name, _ = heads.parse(head)
    head_class: Any = heads.get(head_name)
    if head_class.task != task:
        raise UserError(
            f"head '{head_name}' is for {head_class.task}, not for {task}. Make a network with it by "
            f"linvit.{head_class.maker}, or name a head of {task}: {', '.join(heads_of(task))}"
        )
    name, options = backbones.parse(backbone)
    spec = {"name": name, **dense_options(name), **options}
    shared: dict[str, Any] = {"img_size": img_size, "drop_path_rate": drop_path_rate, **image_channels(in_chans)}
    context = {key: value for key, value in shared.items() if key not in options}
    network = create_backbone(spec, attention, num_classes=0, **context)
    indices, channels, reductions = pyramid(network, head_class.levels)
    drop_unused(network, indices)
    size = {"img_size": img_size} if takes(head_class, "img_size") else {}
    return network, heads.create(head, channels=channels, reductions=reductions, num_classes=num_classes, **size)


def check_fit(backbone: nn.Module, head: Head, given: tuple[tuple[int, ...], ...]) -> None:
    """Raises a `UserError` unless the head was made for these channels and reductions of the backbone's maps."""
    made_for = head.channels, head.reductions
    if made_for != given:
        raise UserError(
            f"{type(head).__name__} was made for channels and reductions {made_for}, but {type(backbone).__name__} "
            f"gives it {given}. Make both by linvit.{head.maker}"
        )


def heads_of(task: str) -> list[str]:
    """Returns the names of linvit's own heads of a task."""
    own = [name for name, owners in heads.entries().items() if owners[0].owner == "linvit"]
    return [name for name in own if getattr(heads.get(name), "task", None) == task]
