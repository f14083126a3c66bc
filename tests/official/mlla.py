"""The parameter names and shapes of the official MLLA."""

from collections.abc import Sequence

from tests.official import conv, linear, norm
from tests.official.soft import batch_norm

Shapes = dict[str, tuple[int, ...]]


def mlla(embed_dim: int, depths: Sequence[int], *, classes: int = 1000, dense: bool = False) -> Shapes:
    """All entries but the tables of rotations and the BatchNorms' integer counters.

    Args:
        embed_dim: Channels of the first stage.
        depths: Blocks of the stages.
        classes: Of the classifier.
        dense: The class for dense tasks: a norm for each feature, no head.
    """
    half, wide = embed_dim // 2, 4 * embed_dim
    state: Shapes = {}
    for name, out, into, side in (
        ("conv1", half, 3, 3),
        ("conv2.0", half, half, 3),
        ("conv2.1", half, half, 3),
        ("conv3.0", wide, half, 3),
        ("conv3.1", embed_dim, wide, 1),
    ):
        state[f"patch_embed.{name}.conv.weight"] = (out, into, side, side)
        state |= batch_norm(f"patch_embed.{name}.norm", out)
    for i, depth in enumerate(depths):
        dim = embed_dim * 2**i
        for j in range(depth):
            block = f"layers.{i}.blocks.{j}"
            for name in ("cpe1", "cpe2", "dwc", "attn.lepe"):
                state |= conv(f"{block}.{name}", dim, 1, 3, 3)
            for name in ("in_proj", "act_proj", "out_proj"):
                state |= linear(f"{block}.{name}", dim, dim)
            state |= linear(f"{block}.attn.qk", 2 * dim, dim)
            state |= norm(f"{block}.norm1", dim) | norm(f"{block}.norm2", dim)
            state |= linear(f"{block}.mlp.fc1", 4 * dim, dim) | linear(f"{block}.mlp.fc2", dim, 4 * dim)
        if i < len(depths) - 1:
            merging = f"layers.{i}.downsample.conv"
            state |= conv(f"{merging}.0.conv", 8 * dim, dim, 1, 1) | conv(f"{merging}.1.conv", 8 * dim, 1, 3, 3)
            state |= conv(f"{merging}.2.conv", 2 * dim, 8 * dim, 1, 1) | batch_norm(f"{merging}.2.norm", 2 * dim)
    if dense:
        for i in range(len(depths)):
            state |= norm(f"norm{i}", embed_dim * 2**i)
        return state
    return state | norm("norm", dim) | linear("head", classes, dim)
