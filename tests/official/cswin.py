"""Names and shapes of CSWin's and FLatten-CSwin's official state dicts."""

from collections.abc import Callable, Sequence
from functools import partial

from tests.official import conv, linear, norm

Shapes = dict[str, tuple[int, ...]]


def cswin(
    embed_dim: int,
    depths: Sequence[int],
    *,
    branches: Sequence[int] = (2, 2, 2, 1),
    mlp_ratio: float = 4,
    num_classes: int = 1000,
    dense: bool = False,
) -> Shapes:
    """A CSWin.

    Args:
        embed_dim: Channels of the first stage.
        depths: Blocks per stage.
        branches: Per stage: 2 for stripes, 1 for the whole map.
        mlp_ratio: Of the blocks.
        num_classes: Of the head.
        dense: The class for dense tasks: a norm per stage, no head.
    """
    dims = [embed_dim * 2**i for i in range(4)]
    shapes = {**conv("stage1_conv_embed.0", dims[0], 3, 7, 7), **norm("stage1_conv_embed.2", dims[0])}
    for s, (dim, depth, count) in enumerate(zip(dims, depths, branches, strict=True), start=1):
        if s > 1:
            shapes |= conv(f"merge{s - 1}.conv", dim, dim // 2, 3, 3) | norm(f"merge{s - 1}.norm", dim)
        for i in range(depth):
            block = f"stage{s}.{i}"
            shapes |= linear(f"{block}.qkv", 3 * dim, dim) | norm(f"{block}.norm1", dim)
            shapes |= linear(f"{block}.proj", dim, dim)
            for half in range(count):
                shapes |= conv(f"{block}.attns.{half}.get_v", dim // count, 1, 3, 3)
            hidden = int(dim * mlp_ratio)
            shapes |= linear(f"{block}.mlp.fc1", hidden, dim) | linear(f"{block}.mlp.fc2", dim, hidden)
            shapes |= norm(f"{block}.norm2", dim)
    if dense:
        for s, dim in enumerate(dims, start=1):
            shapes |= norm(f"norm{s}", dim)
        return shapes
    return shapes | norm("norm", dims[-1]) | linear("head", num_classes, dims[-1])


def flatten_cswin(
    embed_dim: int, depths: Sequence[int], head_dim: int, *, side: int = 56, num_classes: int = 1000
) -> Shapes:
    """A FLatten-CSwin: focused attention on the whole map in the first two stages.

    Args:
        embed_dim: Channels of the first stage.
        depths: Blocks per stage.
        head_dim: Channels per head.
        side: Of the first stage's map: a quarter of the image's.
        num_classes: Of the head.
    """
    shapes = cswin(embed_dim, depths, branches=(1, 1, 2, 1), num_classes=num_classes)
    for s in (1, 2):
        dim, tokens = embed_dim * s, (side // s) ** 2
        for i in range(depths[s - 1]):
            attention = f"stage{s}.{i}.attns.0"
            shapes |= {f"{attention}.scale": (1, 1, dim), f"{attention}.positional_encoding": (1, tokens, dim)}
            shapes |= conv(f"{attention}.dwc", head_dim, 1, 5, 5)
    return shapes


MODELS: dict[str, Callable[..., Shapes]] = {
    "cswin_tiny": partial(cswin, 64, (1, 2, 21, 1)),
    "cswin_small": partial(cswin, 64, (2, 4, 32, 2)),
    "cswin_base": partial(cswin, 96, (2, 4, 32, 2)),
    "cswin_base_384": partial(cswin, 96, (2, 4, 32, 2)),
    "cswin_large": partial(cswin, 144, (2, 4, 32, 2)),
    "cswin_large_384": partial(cswin, 144, (2, 4, 32, 2)),
    "flatten_cswin_tiny": partial(flatten_cswin, 64, (2, 4, 18, 1), 32),
    "flatten_cswin_small": partial(flatten_cswin, 64, (2, 4, 32, 2), 32),
    "flatten_cswin_base": partial(flatten_cswin, 96, (3, 6, 29, 2), 24),
    "flatten_cswin_base_384": partial(flatten_cswin, 96, (3, 6, 29, 2), 24, side=96),
}
"""Every size, as a function of the remaining options."""
