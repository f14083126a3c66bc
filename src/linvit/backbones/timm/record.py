"""Record on a network of how it was built, stored where timm stores it, so that timm can save and rebuild it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import timm
from timm.models import PretrainedCfg
from torch import nn

from linvit.backbones.transformers.hosts import note_replacement
from linvit.image_size import image_size
from linvit.registry import Spec
from linvit.registry.model_info import model_info

REPLACED = "linvit_replaced_attention"
"""Name in timm's registry of all timm models whose attention `linvit.replace_attention` has replaced."""
OWN = "linvit_"
"""Prefix, in timm's registry, of linvit's backbones whose names are names of timm's own models."""


def layout(network: Any, input_size: Sequence[int]) -> dict[str, Any]:
    """Returns the entries of timm's `default_cfg` about the modules of a model, as far as the model has them."""
    found: dict[str, Any] = {}
    names = {module: name for name, module in network.named_modules()}
    convolutions = [name for module, name in names.items() if isinstance(module, nn.Conv2d)]
    if convolutions:
        found["first_conv"] = convolutions[0]
    if hasattr(network, "get_classifier"):
        heads: Any = network.get_classifier()
        found["classifier"] = tuple(names[head] for head in heads) if isinstance(heads, tuple) else names[heads]
    if getattr(network, "feature_info", None):
        stride = network.feature_info[-1]["reduction"]
        found["pool_size"] = tuple(-(-side // stride) for side in input_size[1:])
    return found


def preparation(name: str) -> dict[str, Any]:
    """Returns the preparation of images for a backbone where it differs from timm's defaults (224, 0.875, bicubic)."""
    facts = model_info().get(name)
    if facts is None:
        return {}
    size = (3, facts.img_size, facts.img_size)
    return {"input_size": size, "crop_pct": facts.crop_pct, "crop_mode": facts.crop_mode}


def name_in_timm(name: str) -> str:
    """Returns the name of a linvit backbone in timm's registry."""
    entry = timm.models.model_entrypoint(name) if timm.is_model(name) else None
    return name if entry is None or entry.__module__.startswith("linvit.") else f"{OWN}{name}"


def record(network: Any, name: str, options: Mapping[str, Any]) -> None:
    """Records name and options of a backbone that linvit has built; does nothing for one unknown to timm."""
    known = isinstance(network, nn.Module) and timm.is_model(name_in_timm(name))
    if not known or hasattr(network, "pretrained_cfg"):
        return
    config: dict[str, Any] = asdict(PretrainedCfg(architecture=name_in_timm(name), **preparation(name)))
    if "img_size" in options or "in_chans" in options:
        channels, *size = config["input_size"]
        size = image_size(options.get("img_size", size))
        config["input_size"] = (options.get("in_chans", channels), *size)
    network._model_args = dict(options)
    config |= layout(network, config["input_size"])
    network._traits = {"img_size": config["input_size"][1:], "first_conv": config["first_conv"]}
    network.pretrained_cfg = network.default_cfg = config


def record_replacement(network: Any, attention: Spec | Sequence[Spec | None], img_size: int | Sequence[int]) -> None:
    """Records that the attention of a model was replaced, if its construction is recorded."""
    if hasattr(getattr(network, "config", None), "model_type"):
        note_replacement(network, {"attention": attention, "img_size": img_size})
    config = getattr(network, "pretrained_cfg", None)
    if config is None:
        return
    arguments = dict(getattr(network, "_model_args", {}))
    if config["architecture"] != REPLACED:
        arguments = {**arguments, "model": config["architecture"], "replaced": []}
    replaced = [*arguments["replaced"], {"attention": attention, "img_size": img_size}]
    network._model_args = {**arguments, "replaced": replaced}
    network.pretrained_cfg = network.default_cfg = {**config, "architecture": REPLACED}
