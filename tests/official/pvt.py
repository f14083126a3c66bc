"""PVT and FLatten-PVT: the official parameters with their shapes."""

from collections.abc import Sequence
from typing import Any

from tests.official import conv, linear, norm

Shapes = dict[str, tuple[int, ...]]

DEPTHS = {"tiny": (2, 2, 2, 2), "small": (3, 4, 6, 3), "medium": (3, 4, 18, 3), "large": (3, 8, 27, 3)}
FLATTEN = {"sr_ratios": (1, 1, 1, 1), "focused": True, "class_token": False}
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"pvt_{size}": {"depths": depths} for size, depths in DEPTHS.items()},
    **{f"flatten_pvt_{size}": {"depths": depths, **FLATTEN} for size, depths in DEPTHS.items()},
}
"""Arguments of `pvt` for every published model."""


def pvt(
    *,
    embed_dims: Sequence[int] = (64, 128, 320, 512),
    depths: Sequence[int] = (2, 2, 2, 2),
    num_heads: Sequence[int] = (1, 2, 5, 8),
    mlp_ratios: Sequence[int] = (8, 8, 4, 4),
    sr_ratios: Sequence[int] = (8, 4, 2, 1),
    focused: bool = False,
    class_token: bool = True,
    img_size: int = 224,
    num_classes: int = 1000,
) -> Shapes:
    """Official names and shapes of a PVT on square images whose sides are multiples of 32."""
    shapes: Shapes = {}
    into = 3
    for i, dim in enumerate(embed_dims):
        stage, patch, tokens = i + 1, 2 if i else 4, (img_size // (4 * 2**i)) ** 2
        shapes |= conv(f"patch_embed{stage}.proj", dim, into, patch, patch) | norm(f"patch_embed{stage}.norm", dim)
        shapes[f"pos_embed{stage}"] = (1, tokens + (class_token and stage == 4), dim)
        for block in range(depths[i]):
            name = f"block{stage}.{block}"
            shapes |= norm(f"{name}.norm1", dim) | norm(f"{name}.norm2", dim)
            shapes |= attention(f"{name}.attn", dim, sr_ratios[i])
            if focused:
                shapes |= focused_attention(f"{name}.attn", dim, num_heads[i], tokens // sr_ratios[i] ** 2)
            shapes |= linear(f"{name}.mlp.fc1", dim * mlp_ratios[i], dim)
            shapes |= linear(f"{name}.mlp.fc2", dim, dim * mlp_ratios[i])
        into = dim
    if class_token:
        shapes["cls_token"] = (1, 1, into)
    return shapes | norm("norm", into) | linear("head", num_classes, into)


def attention(name: str, dim: int, sr_ratio: int) -> Shapes:
    """Separate q and kv, and the strided convolution and norm of the reduction, if there is one."""
    shapes = linear(f"{name}.q", dim, dim) | linear(f"{name}.kv", 2 * dim, dim) | linear(f"{name}.proj", dim, dim)
    if sr_ratio > 1:
        shapes |= conv(f"{name}.sr", dim, dim, sr_ratio, sr_ratio) | norm(f"{name}.norm", dim)
    return shapes


def focused_attention(name: str, dim: int, heads: int, keys: int) -> Shapes:
    """What focused attention adds."""
    return {
        f"{name}.scale": (1, 1, dim),
        f"{name}.positional_encoding": (1, keys, dim),
        **conv(f"{name}.dwc", dim // heads, 1, 5, 5),
    }
