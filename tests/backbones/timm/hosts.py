"""Small models of timm, one or more for each kind of attention that linvit replaces."""

from typing import Any, NamedTuple

import timm
import torch
from torch import nn


class Host(NamedTuple):
    """How a small model is built, the side of its images, and another size that timm lets it have, if any."""

    side: int
    options: dict[str, Any]
    other: tuple[int, int] | None = None


PYRAMID: dict[str, Any] = {"embed_dims": (8, 16, 16, 32), "num_heads": (1, 2, 2, 4)}
MAPS: dict[str, Any] = {"img_size": 64, "embed_dim": (32, 32, 64, 64), "depths": (1, 1, 1, 1), "stem_width": 16}
WINDOWS: dict[str, Any] = {"depths": (2, 2, 1, 1), "embed_dim": 24, "num_heads": (1, 2, 4, 8), "window_size": 4}
SAM: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 2, "window_size": 4, "global_attn_indexes": (1,)}
HOSTS: dict[str, Host] = {
    "samvit_base_patch16": Host(96, {"img_size": 96, **SAM}, (64, 128)),
    "swinv2_tiny_window8_256": Host(64, {"img_size": 64, **WINDOWS}, (96, 128)),
    "hiera_tiny_224": Host(64, {"img_size": 64, "embed_dim": 16, "num_heads": 1, "stages": (1, 2, 2, 1)}),
    "maxvit_tiny_tf_224": Host(64, MAPS, (96, 64)),
    "maxvit_rmlp_pico_rw_256": Host(64, MAPS, (96, 64)),
    "coatnet_nano_rw_224": Host(64, MAPS, (96, 64)),
    "cait_xxs24_224": Host(64, {"img_size": 64, "depth": 2, "embed_dim": 32, "num_heads": 2}),
    "twins_svt_small": Host(64, {"depths": (2, 2, 2, 1), **PYRAMID}, (72, 100)),
    "twins_pcpvt_small": Host(64, {"depths": (1, 1, 1, 1), **PYRAMID}, (96, 64)),
    "pit_ti_distilled_224": Host(64, {"img_size": 64, "base_dims": (8, 8, 8), "depth": (1, 2, 1)}),
    "davit_tiny": Host(64, {"depths": (1, 1, 1, 1), **PYRAMID}, (72, 100)),
    "tiny_vit_5m_224": Host(64, {**PYRAMID, "embed_dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1)}, (72, 100)),
    "levit_128s": Host(64, {"img_size": 64, "embed_dim": (16, 24, 32), "key_dim": 4, "num_heads": (2, 3, 4)}),
    "crossvit_9_240": Host(120, {"img_size": 120, "depth": ((1, 1, 0),) * 2}, (96, 150)),
    "nextvit_small": Host(96, {"depths": (1, 2, 5, 2)}, (128, 64)),
    "naflexvit_base_patch16_gap": Host(64, {"embed_dim": 32, "depth": 2, "num_heads": 2}, (96, 32)),
}


def build(name: str, **options: Any) -> nn.Module:
    """Builds a small model in evaluation mode, always with the same weights."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(name, **{"num_classes": 5, **HOSTS[name].options, **options})
    return model.eval()
