"""Names and shapes of whole networks in mmsegmentation's state dicts, with Swin's and PVT's dense backbones."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tests.official import conv, norm
from tests.official.pvt import pvt
from tests.official.swin import swin

Shapes = dict[str, tuple[int, ...]]


def conv_module(name: str, out: int, into: int, kernel: int) -> Shapes:
    """A convolution without bias, and BatchNorm with its running statistics."""
    statistics = {f"{name}.bn.{part}": (out,) for part in ("running_mean", "running_var")}
    return {f"{name}.conv.weight": (out, into, kernel, kernel), **norm(f"{name}.bn", out), **statistics}


def upernet(channels: Sequence[int], classes: int, width: int, auxiliary_width: int) -> Shapes:
    """The decode head and the auxiliary head."""
    shapes = conv("decode_head.conv_seg", classes, width, 1, 1)
    for i in range(4):
        shapes |= conv_module(f"decode_head.psp_modules.{i}.1", width, channels[-1], 1)
    shapes |= conv_module("decode_head.bottleneck", width, channels[-1] + 4 * width, 3)
    for i, into in enumerate(channels[:-1]):
        shapes |= conv_module(f"decode_head.lateral_convs.{i}", width, into, 1)
        shapes |= conv_module(f"decode_head.fpn_convs.{i}", width, width, 3)
    shapes |= conv_module("decode_head.fpn_bottleneck", width, len(channels) * width, 3)
    shapes |= conv("auxiliary_head.conv_seg", classes, auxiliary_width, 1, 1)
    return shapes | conv_module("auxiliary_head.convs.0", auxiliary_width, channels[-2], 3)


def semantic_fpn(channels: Sequence[int], classes: int, width: int, fpn_width: int) -> Shapes:
    """The neck and the decode head."""
    shapes = conv("decode_head.conv_seg", classes, width, 1, 1)
    for i, into in enumerate(channels):
        shapes |= conv(f"neck.lateral_convs.{i}.conv", fpn_width, into, 1, 1)
        shapes |= conv(f"neck.fpn_convs.{i}.conv", fpn_width, fpn_width, 3, 3)
        for j in range(max(1, i)):
            shapes |= conv_module(f"decode_head.scale_heads.{i}.{2 * j}", width, width if j else fpn_width, 3)
    return shapes


def dense_swin(sizes: Mapping[str, Any]) -> Shapes:
    """Swin's backbone for dense prediction: a norm for each feature, no classifier."""
    shapes = {name: shape for name, shape in swin(**sizes).items() if not re.match(r"(norm|head)\.", name)}
    for i in range(len(sizes["depths"])):
        shapes |= norm(f"norm{i}", sizes["embed_dim"] * 2**i)
    return under_backbone(shapes)


def dense_pvt(sizes: Mapping[str, Any]) -> Shapes:
    """PVT's backbone for dense prediction: no class token but its position, no final norm, no classifier."""
    shapes = {name: shape for name, shape in pvt(**sizes).items() if not re.match(r"norm\.|head\.|cls_token", name)}
    return under_backbone(shapes)


def under_backbone(shapes: Shapes) -> Shapes:
    """The names of a backbone within a network."""
    return {f"backbone.{name}": shape for name, shape in shapes.items()}


def renamed_swin(name: str) -> str:
    """The name that later releases of mmsegmentation give a parameter of Swin."""
    for old, new in (
        ("patch_embed.proj.", "patch_embed.projection."),
        ("backbone.layers.", "backbone.stages."),
        (".attn.", ".attn.w_msa."),
        (".mlp.fc1.", ".ffn.layers.0.0."),
        (".mlp.fc2.", ".ffn.layers.1."),
    ):
        name = name.replace(old, new)
    return name
