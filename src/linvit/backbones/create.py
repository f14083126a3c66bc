"""Builds backbones for networks that have more than a backbone: with any attention, and in the form for dense tasks."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import nn

from linvit.errors import UserError
from linvit.registry import Spec, backbones
from linvit.signatures import takes


def create_backbone(spec: Spec, attention: Spec | Sequence[Spec] | None = None, **options: Any) -> nn.Module:
    """Builds the backbone of a spec with another attention in it, unless that is None.

    Raises:
        UserError: If the backbone takes no attention; else as `linvit.create_backbone`.
    """
    name, _ = backbones.parse(spec)
    if attention is not None:
        if not takes(backbones.get(name), "attention"):
            raise UserError(
                f"backbone '{name}' brings its own attention, so {attention!r} cannot go into it; set attention to null"
            )
        options["attention"] = attention
    return cast("nn.Module", backbones.create(spec, **options))


def image_channels(in_chans: int) -> dict[str, int]:
    """The option of a backbone for images of so many channels; three are what every backbone takes without it."""
    return {} if in_chans == 3 else {"in_chans": in_chans}


def dense_options(name: str) -> Mapping[str, Any]:
    """Returns the options that make a registered backbone what its authors publish for dense tasks."""
    constructor: Any = backbones.get(name)
    preset: dict[str, Any] = {}
    while isinstance(constructor, partial):
        preset = {**constructor.keywords, **preset}
        constructor = constructor.func
    dense = getattr(constructor, "dense", {}) if isinstance(constructor, type) else {}
    if takes(constructor, "dynamic_img_size"):  # of timm's models
        dense = {**dense, "dynamic_img_size": True}
    return {option: value for option, value in dense.items() if option not in preset}
