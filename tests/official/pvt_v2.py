"""PVTv2 and FLatten-PVTv2: the official parameters with their shapes."""

from collections.abc import Sequence
from typing import Any

from tests.official import conv, linear, norm
from tests.official.pvt import Shapes, attention, focused_attention

VARIANTS: dict[str, dict[str, Any]] = {
    "pvt_v2_b0": {"embed_dims": (32, 64, 160, 256)},
    "pvt_v2_b1": {},
    "pvt_v2_b2": {"depths": (3, 4, 6, 3)},
    "pvt_v2_b3": {"depths": (3, 4, 18, 3)},
    "pvt_v2_b4": {"depths": (3, 8, 27, 3)},
    "pvt_v2_b5": {"depths": (3, 6, 40, 3), "mlp_ratios": (4, 4, 4, 4)},
    "pvt_v2_b2_li": {"depths": (3, 4, 6, 3), "pooled": True},
}
VARIANTS |= {
    f"flatten_pvt_v2_b{i}": {**VARIANTS[f"pvt_v2_b{i}"], "sr_ratios": (1, 1, 1, 1), "focused": True} for i in range(5)
}
"""Arguments of `pvt_v2` for every published model."""


def pvt_v2(
    *,
    embed_dims: Sequence[int] = (64, 128, 320, 512),
    depths: Sequence[int] = (2, 2, 2, 2),
    num_heads: Sequence[int] = (1, 2, 5, 8),
    mlp_ratios: Sequence[int] = (8, 8, 4, 4),
    sr_ratios: Sequence[int] = (8, 4, 2, 1),
    pooled: bool = False,
    focused: bool = False,
    img_size: int = 224,
    num_classes: int = 1000,
) -> Shapes:
    """Official names and shapes of a PVTv2; `pooled` is the linear variant."""
    shapes: Shapes = {}
    into = 3
    for i, dim in enumerate(embed_dims):
        stage, patch, tokens = i + 1, 3 if i else 7, (img_size // (4 * 2**i)) ** 2
        shapes |= conv(f"patch_embed{stage}.proj", dim, into, patch, patch) | norm(f"patch_embed{stage}.norm", dim)
        for block in range(depths[i]):
            name, hidden = f"block{stage}.{block}", dim * mlp_ratios[i]
            shapes |= norm(f"{name}.norm1", dim) | norm(f"{name}.norm2", dim)
            shapes |= attention(f"{name}.attn", dim, 1 if pooled else sr_ratios[i])
            if pooled:
                shapes |= conv(f"{name}.attn.sr", dim, dim, 1, 1) | norm(f"{name}.attn.norm", dim)
            if focused:
                shapes |= focused_attention(f"{name}.attn", dim, num_heads[i], tokens // sr_ratios[i] ** 2)
            shapes |= linear(f"{name}.mlp.fc1", hidden, dim) | linear(f"{name}.mlp.fc2", dim, hidden)
            shapes |= conv(f"{name}.mlp.dwconv.dwconv", hidden, 1, 3, 3)
        shapes |= norm(f"norm{stage}", dim)
        into = dim
    return shapes | linear("head", num_classes, into)
