"""The families of backbones, derived from the registry, and the smallest member of each that its options allow."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from linvit.registry import backbones, heads
from linvit.registry.signatures import parameters_of
from tests.helpers import own_names

SUPPLIED = {"model": "test_resnet"}  # values for options without a default
HEAD_WIDTH = 8
NARROW = dict.fromkeys(("width", "fpn_width", "auxiliary_width", "fc_width"), 8)
NARROW |= {"proposals": [40, 20], "roi_samples": 16, "max_detections": 10}
SIZES = {"embed_dim", "embed_dims", "depth", "depths", "num_heads", "mlp_ratio", "head_width", "head_widths"}
SIZES |= {"layer_scale"}


def family(name: str) -> Callable[..., Any]:
    """The class or function behind a registered name."""
    constructor = backbones.get(name)
    while isinstance(constructor, functools.partial):
        constructor = constructor.func
    return constructor


def small(name: str, **supplied: Any) -> dict[str, Any]:
    """The spec of a registered backbone with few channels and blocks: what its other options say stays.

    Args:
        name: A registered name.
        supplied: Values for options that have no default, where there are such.
    """
    parameters = parameters_of(backbones.get(name))
    required = [key for key, default in parameters.items() if default is inspect.Parameter.empty]
    spec = {"name": name, **{key: {**SUPPLIED, **supplied}[key] for key in required}}
    heads, attention = parameters.get("num_heads"), parameters.get("attention")
    for key, default in parameters.items():
        if key in ("embed_dim", "embed_dims"):
            first = isinstance(default, int) and not isinstance(heads, int)  # stage's alone; the others follow it
            spec[key] = _channels(heads[0] if first else heads)
        elif key == "head_width":
            spec[key] = HEAD_WIDTH
        elif key == "head_widths":
            spec[key] = [HEAD_WIDTH, HEAD_WIDTH]
        elif key in ("depth", "depths") and not _one_spec_per_block(attention, default):
            spec[key] = 2 if isinstance(default, int) else [1] * len(default)
    return spec


def narrow(head: str) -> dict[str, Any]:
    """The spec of a registered head with few channels and detections."""
    options = parameters_of(heads.get(head))
    return {"name": head, **{option: value for option, value in NARROW.items() if option in options}}


@functools.cache
def kinds() -> list[str]:
    """A name for each way in which linvit's own backbones differ, sizes aside: that of the fewest heads."""
    found: dict[str, str] = {}
    for name in sorted(own_names(backbones), key=_heads):
        found.setdefault(f"{family(name).__qualname__} {_own_options(name)}", name)
    return sorted(found.values())


@functools.cache
def families() -> dict[str, str]:
    """A name for each class or function that builds backbones: that with the fewest options of its own."""
    found: dict[str, str] = {}
    for name in sorted(kinds(), key=lambda name: len(_own_options(name))):
        found.setdefault(family(name).__qualname__, name)
    return found


def _own_options(name: str) -> dict[str, Any]:
    """What a name sets otherwise than its constructor does, sizes aside."""
    defaults = parameters_of(family(name))
    options = parameters_of(backbones.get(name))
    return {key: value for key, value in options.items() if key not in SIZES and value != defaults[key]}


def _heads(name: str) -> int:
    heads = parameters_of(backbones.get(name)).get("num_heads", 0)
    return heads if isinstance(heads, int) else sum(heads)


def _one_spec_per_block(attention: Any, depths: Any) -> bool:
    blocks = depths if isinstance(depths, int) else sum(depths)
    return not isinstance(attention, str | Mapping | None) and len(attention) == blocks


def _channels(heads: Any) -> Any:
    return HEAD_WIDTH * heads if isinstance(heads, int) else [HEAD_WIDTH * count for count in heads]
