"""Builds backbones from specs: with any attention, and in the form for dense tasks."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch import nn

from linvit.backbones.replace_attention import replace_attention
from linvit.backbones.timm.record import record
from linvit.errors import UserError, check_number
from linvit.registry import Spec, backbones
from linvit.registry.signatures import takes


def create_backbone(
    spec: Spec,
    attention: Spec | Sequence[Spec | None] | None = None,
    *,
    num_classes: int | None = None,
    img_size: int | Sequence[int] | None = None,
    in_chans: int | None = None,
    drop_path_rate: float | None = None,
    **options: Any,
) -> nn.Module:
    """Builds the backbone of a spec. None leaves an option at the backbone's default.

    Args:
        spec: A name, or a mapping with `name` and options of the backbone.
        attention: Replaces the backbone's attention: one spec, or a list with one per stage or per block, in which
            None keeps that of a stage or block.
        num_classes: Classes; 0 for features.
        img_size: Side or (H, W) of the images (B, in_chans, H, W) that it is built for.
        in_chans: Image channels.
        drop_path_rate: Stochastic depth of the last block.
        options: Further options of the backbone, such as `depth`.

    Raises:
        UserError: If the name does not exist, or the backbone does not accept an option or another attention.

    Example:
        >>> linvit.create_backbone("pvt_tiny", attention="focused", num_classes=10, img_size=64)
    """
    given = {"num_classes": num_classes, "img_size": img_size, "in_chans": in_chans, "drop_path_rate": drop_path_rate}
    options |= {name: value for name, value in given.items() if value is not None}
    if drop_path_rate is not None:  # otherwise the backbone would fail in its first step
        check_number("drop_path_rate", drop_path_rate, at_least=0, below=1)
    name, _ = backbones.parse(spec)
    if attention is not None:
        if not takes(backbones.get(name), "attention"):
            raise UserError(
                f"backbone '{name}' has a fixed attention, which {attention!r} cannot replace; set attention to null"
            )
        if isinstance(attention, list | tuple) and None in attention:
            built = _built(spec, options)
            return replace_attention(built, attention, 224 if img_size is None else img_size)
        options["attention"] = attention
    return _built(spec, options)


def _built(spec: Spec, options: Mapping[str, Any]) -> nn.Module:
    """Builds the backbone, with a record of how it was built."""
    network = cast("nn.Module", backbones.create(spec, **options))
    name, own = backbones.parse(spec)
    record(network, name, {**own, **options})
    return network


def image_channels(in_chans: int) -> dict[str, int]:
    """Returns the option of a backbone for this number of image channels; empty for three, the default everywhere."""
    return {} if in_chans == 3 else {"in_chans": in_chans}


def dense_options(name: str) -> Mapping[str, Any]:
    """Returns the options that turn a registered backbone into its authors' form for dense tasks."""
    constructor: Any = backbones.get(name)
    preset: dict[str, Any] = {}
    while isinstance(constructor, partial):
        preset = {**constructor.keywords, **preset}
        constructor = constructor.func
    dense = getattr(constructor, "dense", {}) if isinstance(constructor, type) else {}
    if takes(constructor, "dynamic_img_size"):  # of timm's models
        dense = {**dense, "dynamic_img_size": True}
    return {option: value for option, value in dense.items() if option not in preset}
