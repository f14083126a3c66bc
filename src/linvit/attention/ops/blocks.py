"""A grid of patches cut into blocks, as even as possible, and tables of the weights between blocks."""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.ops.functional import same_size

INITIAL = {
    "linear": lambda distance, largest: 1 - distance / largest,
    "cos": lambda distance, largest: (math.pi / 4 * distance / largest).cos(),
    "exp": lambda distance, largest: (-distance).exp(),
    "local": lambda distance, largest: (distance <= 1.5).to(distance),
    "gaussian": lambda distance, largest: (-((3 * distance / largest) ** 2) / 2).exp(),
}
"""Initial W from the distances of blocks, in blocks, and the largest of them."""


class Blocks(NamedTuple):
    """How a grid is cut. Where a side does not divide, the last blocks are smaller, and are filled up with zeros."""

    size: tuple[int, int]
    sides: tuple[int, int]

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks per column and per row of the grid."""
        return -(-self.size[0] // self.sides[0]), -(-self.size[1] // self.sides[1])

    def cut(self, x: Tensor) -> Tensor:
        """Patches (B, h, H W, d) as blocks (B, h, G, w, d) of w patches each, both row by row."""
        plane: Tensor = x.unflatten(2, self.size)
        missing = [n * side - whole for n, side, whole in zip(self.counts, self.sides, self.size, strict=True)]
        if any(missing):
            plane = F.pad(plane, (0, 0, 0, missing[1], 0, missing[0]))
        parts: Tensor = plane.unflatten(3, (-1, self.sides[1])).unflatten(2, (-1, self.sides[0])).transpose(3, 4)
        return parts.flatten(4, 5).flatten(2, 3)

    def join(self, blocks: Tensor) -> Tensor:
        """What `cut` makes, back as patches (B, h, H W, d)."""
        parts: Tensor = blocks.unflatten(3, self.sides).unflatten(2, self.counts).transpose(3, 4)
        plane = parts.flatten(4, 5).flatten(2, 3)
        patches: Tensor = plane[:, :, : self.size[0], : self.size[1]].flatten(2, 3)
        return patches

    def numbers(self, device: torch.device) -> Tensor:
        """The block of each patch, (H W,)."""
        rows, columns = (
            torch.arange(whole, device=device) // side for whole, side in zip(self.size, self.sides, strict=True)
        )
        return (rows[:, None] * self.counts[1] + columns).flatten()


def even_blocks(size: tuple[int, int], most: int) -> Blocks:
    """At most `most` blocks per column and per row of a grid."""
    return Blocks(size, (-(-size[0] // most), -(-size[1] // most)))


def initial_weights(counts: tuple[int, int], init: str) -> Tensor:
    """W (G, H, G, H) of blocks in G rows and H columns; see `linvit.attention.mhla`."""
    places = torch.cartesian_prod(*(torch.arange(count, dtype=torch.float32) for count in counts))
    distance = torch.cdist(places, places)
    weights = INITIAL[init](distance, distance.max().clamp_min(1))
    if init != "gaussian":
        weights = weights / weights.sum(0)
    table: Tensor = weights.unflatten(1, counts).unflatten(0, counts)
    return table


def resize_weights(weights: Tensor, counts: tuple[int, int]) -> Tensor:
    """Weights (G, H, G, H) of blocks to blocks for other numbers of blocks, bilinear in both places.

    The sum over all blocks keeps its size: of more blocks each weighs less.
    """
    old = (weights.shape[0], weights.shape[1])
    if same_size(old, counts):
        return weights

    def resized(x: Tensor) -> Tensor:
        """Interpolates the last two dimensions, (n, G, H) -> (n, G', H')."""
        return F.interpolate(x[None], size=counts, mode="bilinear", align_corners=False)[0]

    table = resized(weights.flatten(0, 1)).flatten(1).T  # keys (G' H') by queries (G H)
    table = resized(table.unflatten(1, old)).flatten(1).T  # queries (G' H') by keys (G' H')
    share = (old[0] * old[1]) / (counts[0] * counts[1])
    found: Tensor = (table * share).unflatten(1, counts).unflatten(0, counts)
    return found
