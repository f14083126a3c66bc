"""The parameter names and shapes of the official RAVLT, MAViT, NaLaFormer and PolaFormer++."""

from collections.abc import Sequence
from typing import Literal

from tests.official import conv, linear, norm
from tests.official.soft import batch_norm

Shapes = dict[str, tuple[int, ...]]


def ravlt(
    dims: Sequence[int],
    heads: Sequence[int],
    depths: Sequence[int],
    *,
    kind: Literal["rala", "mala", "nala", "pola_pp"] = "rala",
    mlp_ratio: float = 3.5,
    projection: int = 1024,
    classes: int = 1000,
    dense: bool = False,
) -> Shapes:
    """All entries but the tables of rotations and the BatchNorms' integer counters.

    Args:
        dims: Channels of the stages.
        heads: Heads of the stages.
        depths: Blocks of the stages.
        kind: Attention of the first two stages, and so the repository.
        mlp_ratio: Of the blocks.
        projection: Channels before the classifier.
        classes: Of the classifier.
        dense: The class for dense tasks: a norm for each feature, no head.
    """
    state: Shapes = {}
    half = dims[0] // 2
    for place, (out, into) in {0: (half, 3), 3: (half, half), 6: (half, half), 9: (dims[0], half)}.items():
        state |= conv(f"patch_embed.proj.{place}", out, into, 3, 3) | batch_norm(f"patch_embed.proj.{place + 1}", out)
    pointwise = conv_1x1 if kind in ("rala", "mala") else linear
    for i, dim in enumerate(dims):
        for j in range(depths[i]):
            block, hidden = f"layers.{i}.blocks.{j}", int(mlp_ratio * dim)
            joint = {"nala": "qkvg", "pola_pp": "qkvg" if i < 2 else "qkvo"}.get(kind, "qkvo")
            out = "out_proj" if kind == "nala" else "proj"
            state |= pointwise(f"{block}.attn.{joint}", 4 * dim, dim) | pointwise(f"{block}.attn.{out}", dim, dim)
            state |= conv(f"{block}.attn.lepe", dim, 1, 5, 5)
            if kind == "nala":
                state |= norm(f"{block}.attn.ln", dim)
            if kind == "pola_pp" and i < 2:
                state |= {f"{block}.attn.{name}": (1, heads[i], 1, 2 * dim // heads[i]) for name in ("s1", "s2")}
            for name in ("cpe1", "cpe2") if kind == "nala" else ("pos",):
                state |= conv(f"{block}.{name}", dim, 1, 3, 3)
            state |= norm(f"{block}.norm1.norm", dim) | norm(f"{block}.norm2.norm", dim)
            state |= pointwise(f"{block}.ffn.fc1", hidden, dim) | pointwise(f"{block}.ffn.fc2", dim, hidden)
            state |= conv(f"{block}.ffn.dwconv", hidden, 1, 3, 3)
            state |= {f"{block}.gamma_1": (1, dim, 1, 1), f"{block}.gamma_2": (1, dim, 1, 1)}
        if i < 3:
            merging = f"layers.{i}.downsample"
            state |= conv(f"{merging}.reduction", dims[i + 1], dim, 3, 3) | batch_norm(f"{merging}.norm", dims[i + 1])
    if dense:
        for i, dim in enumerate(dims):
            state |= norm(f"extra_norms.{i}.norm", dim)
        return state
    state |= (linear if kind == "nala" else conv_1x1)("proj", projection, dims[3]) | batch_norm("norm", projection)
    return state | conv_1x1("head", classes, projection)


def conv_1x1(name: str, out: int, into: int) -> Shapes:
    """A 1 x 1 convolution with bias."""
    return conv(name, out, into, 1, 1)
