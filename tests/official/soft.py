"""The parameter names and shapes of the official SOFT code; SOFT++ has the same."""

from collections.abc import Sequence
from itertools import pairwise

from tests.official import conv, linear, norm

SIZES = {
    "tiny": {"dims": (64, 128, 320, 512), "heads": (2, 4, 10, 16), "depths": (1, 2, 3, 2)},
    "small": {"dims": (64, 128, 320, 512), "heads": (2, 4, 10, 16), "depths": (1, 3, 20, 4)},
    "medium": {"dims": (64, 128, 288, 512), "heads": (2, 4, 9, 16), "depths": (1, 3, 29, 5)},
    "large": {"dims": (64, 128, 320, 512), "heads": (2, 4, 10, 16), "depths": (1, 3, 40, 5)},
    "huge": {"dims": (64, 128, 352, 512), "heads": (2, 4, 11, 16), "depths": (1, 5, 49, 5)},
}


def soft(
    dims: Sequence[int], heads: Sequence[int], depths: Sequence[int], classes: int = 1000, in_chans: int = 3
) -> dict[str, tuple[int, ...]]:
    """All entries but the BatchNorms' integer counters."""
    state: dict[str, tuple[int, ...]] = {"cls_token": (1, 1, dims[3])}
    stem = [in_chans, 32, 32, dims[0]]
    for s in range(4):
        widths = [dims[s - 1], dims[s]] if s else stem
        for i, (into, out) in enumerate(pairwise(widths)):
            state |= conv(f"patch_embed{s + 1}.proj.{3 * i}", out, into, 3, 3)
            state |= batch_norm(f"patch_embed{s + 1}.proj.{3 * i + 1}", out)
        state[f"pos_embed{s + 1}"] = (1, (56 // 2**s) ** 2 + (s == 3), dims[s])
    for s, (ratio, size) in enumerate([(8, 9), (4, 5), (2, 3)]):
        for i in range(depths[s]):
            state |= softmax_free_block(f"block{s + 1}.{i}.att", dims[s], heads[s], ratio, size)
    for i in range(depths[3]):
        state |= block(f"block4.{i}", dims[3])
    return state | norm("norm", dims[3]) | linear("head", classes, dims[3])


def batch_norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    """Without the integer counter."""
    return norm(name, width) | {f"{name}.running_mean": (width,), f"{name}.running_var": (width,)}


def softmax_free_block(name: str, dim: int, heads: int, ratio: int, size: int) -> dict[str, tuple[int, ...]]:
    """A post-norm block of stages 1 to 3."""
    width = dim // heads
    return {
        **linear(f"{name}.mha.W_q", dim, dim),
        **linear(f"{name}.mha.W_v", dim, dim),
        f"{name}.mha.attn.Qlandmark_op.weight": (width, width, ratio, ratio),
        **norm(f"{name}.mha.attn.Qnorm_act.0", width),
        f"{name}.mha.attn.conv.weight": (heads, 1, size, size),
        **linear(f"{name}.mha.ff", dim, dim),
        **norm(f"{name}.norm1", dim),
        **linear(f"{name}.ff1", 4 * dim, dim),
        **linear(f"{name}.ff2", dim, 4 * dim),
        **norm(f"{name}.norm2", dim),
    }


def block(name: str, dim: int) -> dict[str, tuple[int, ...]]:
    """A pre-norm block of stage 4."""
    return {
        **norm(f"{name}.norm1", dim),
        **linear(f"{name}.attn.q", dim, dim),
        **linear(f"{name}.attn.kv", 2 * dim, dim),
        **linear(f"{name}.attn.proj", dim, dim),
        **norm(f"{name}.norm2", dim),
        **linear(f"{name}.mlp.fc1", 4 * dim, dim),
        **linear(f"{name}.mlp.fc2", dim, 4 * dim),
    }
