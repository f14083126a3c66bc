"""PolaFormer's models: the official names and shapes, which are FLatten's with a gate and powers."""

from typing import Any

from tests.official import linear
from tests.official.pvt import FLATTEN, pvt
from tests.official.swin import swin

Shapes = dict[str, tuple[int, ...]]
JOINED = {"q": ("qg", 2), "qkv": ("qkvg", 4)}  # the gate's rows are the last ones


def pola_pvt(**sizes: Any) -> Shapes:
    """In all stages."""
    return polarised(pvt(**sizes, **FLATTEN))


def pola_swin(**sizes: Any) -> Shapes:
    """In the first two stages."""
    return polarised(swin(**sizes, focused_stages=2))


def polarised(shapes: Shapes) -> Shapes:
    """PolaFormer's attention in the place of focused attention."""
    found = dict(shapes)
    for name, shape in shapes.items():
        layer, _, last = name.rpartition(".")
        if last != "scale":
            continue
        dim, width = shape[2], shapes[f"{layer}.dwc.weight"][0]
        found[f"{layer}.power"] = (1, dim // width, 1, width)
        for plain, (gated, parts) in JOINED.items():
            if f"{layer}.{plain}.weight" in shapes:
                del found[f"{layer}.{plain}.weight"], found[f"{layer}.{plain}.bias"]
                found |= linear(f"{layer}.{gated}", parts * dim, dim)
    return found
