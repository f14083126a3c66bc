"""Lists of images of several sizes: packed into one row of tokens, and back."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from linvit.attention.base import Grid, Packed
from linvit.errors import UserError


def as_batch(images: Sequence[Tensor]) -> Tensor | None:
    """Stacks images (C, H, W) of one size, (B, C, H, W); None if they are of several sizes."""
    kinds = {f"{image.ndim}-d {image.dtype}" if isinstance(image, Tensor) else type(image).__name__ for image in images}
    if len(kinds) != 1 or not isinstance(images[0], Tensor) or images[0].ndim != 3:
        given = ", ".join(sorted(kinds)) or "none"
        raise UserError(f"a list of images must have at least one, all tensors (C, H, W) of one dtype; got {given}")
    return torch.stack(list(images)) if len({image.shape for image in images}) == 1 else None


def by_size(images: Sequence[Tensor]) -> list[list[int]]:
    """Returns the numbers of the images (C, H, W) of each size."""
    alike: dict[torch.Size, list[int]] = {}
    for i, image in enumerate(images):
        alike.setdefault(image.shape, []).append(i)
    return list(alike.values())


def pack(embed: Callable[[Tensor], tuple[Tensor, Grid]], images: Sequence[Tensor]) -> tuple[Tensor, Packed]:
    """Embeds images (C, H, W), those of one size together, as one row of tokens (1, T, C).

    `embed` turns images (n, C, H, W) of one size into tokens (n, N, C) and their grid.
    """
    found: dict[int, tuple[Tensor, Grid]] = {}
    for numbers in by_size(images):
        tokens, grid = embed(torch.stack([images[i] for i in numbers]))
        found |= {i: (own, grid) for i, own in zip(numbers, tokens.unbind(), strict=True)}
    packed = Packed([found[i][1].size for i in range(len(images))], found[0][1].num_prefix)
    return torch.cat([found[i][0] for i in packed.order])[None], packed
