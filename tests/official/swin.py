"""Swin's official state dicts: Microsoft's names, those of FLatten-Swin included, and timm's."""

from collections.abc import Sequence

from tests.official import conv, linear, norm

SIZES = {
    "tiny": {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)},
    "small": {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)},
    "base": {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)},
}


def swin(
    embed_dim: int,
    depths: Sequence[int],
    num_heads: Sequence[int],
    img_size: int = 224,
    window_size: int = 7,
    focused_stages: int = 0,
    num_classes: int = 1000,
    timm: bool = False,
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every learned tensor; the focused stages are the first ones, with the map as their window."""
    shapes = conv("patch_embed.proj", embed_dim, 3, 4, 4) | norm("patch_embed.norm", embed_dim)
    for i, (depth, heads) in enumerate(zip(depths, num_heads, strict=True)):
        width, side = embed_dim * 2**i, img_size // 4 // 2**i
        for j in range(depth):
            start = f"layers.{i}.blocks.{j}"
            shapes |= norm(f"{start}.norm1", width)
            if i < focused_stages:
                shapes[f"{start}.attn.scale"] = (1, 1, width)
                shapes[f"{start}.attn.positional_encoding"] = (1, side**2, width)
                shapes |= conv(f"{start}.attn.dwc", width // heads, 1, 5, 5)
            else:
                shapes[f"{start}.attn.relative_position_bias_table"] = ((2 * min(window_size, side) - 1) ** 2, heads)
            shapes |= linear(f"{start}.attn.qkv", 3 * width, width) | linear(f"{start}.attn.proj", width, width)
            shapes |= norm(f"{start}.norm2", width)
            shapes |= linear(f"{start}.mlp.fc1", 4 * width, width) | linear(f"{start}.mlp.fc2", width, 4 * width)
        if i < len(depths) - 1:
            merging = f"layers.{i + timm}.downsample"
            shapes[f"{merging}.reduction.weight"] = (2 * width, 4 * width)
            shapes |= norm(f"{merging}.norm", 4 * width)
    return shapes | norm("norm", width) | linear("head.fc" if timm else "head", num_classes, width)
