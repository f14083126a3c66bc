"""Positions of tokens: of images of one size (`Grid`), or of several sizes in one row (`Packed`)."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from linvit.errors import UserError, check_number


class Grid(NamedTuple):
    """Positions of the tokens in the image. The spatial size is passed down, never inferred from a token count.

    Tokens are row-major: the prefix (class and register tokens) first, then patch `row * W + column`.

    A forward pass creates another one with `Grid(...)`: torch 2.11 loses the fields where it compiles `_replace`.

    Attributes:
        size: Patch grid of the queries, (H, W).
        kv_size: Patch grid of the keys and values; None means `size`. Differs under spatial reduction.
        num_prefix: Class and register tokens before the patch tokens, in q, k and v alike.
    """

    size: tuple[int, int]
    kv_size: tuple[int, int] | None = None
    num_prefix: int = 0

    @property
    def keys_size(self) -> tuple[int, int]:
        """Patch grid of the keys and values, (H, W)."""
        return self.size if self.kv_size is None else self.kv_size

    @property
    def num_queries(self) -> int:
        """Query tokens N, prefix included."""
        return self.num_prefix + self.size[0] * self.size[1]

    @property
    def num_keys(self) -> int:
        """Key and value tokens M, prefix included."""
        height, width = self.keys_size
        return self.num_prefix + height * width

    def check(self) -> None:
        """Raises a `UserError` unless both patch grids have a patch and the prefix is not negative."""
        for name, sides in (("size", self.size), ("kv_size", self.keys_size)):
            for side in sides:
                check_number(f"the grid's {name} {tuple(sides)}: a side", side, at_least=1, whole=True)
        check_number("the grid's num_prefix", self.num_prefix, at_least=0, whole=True)

    def plane(self, x: Tensor) -> Tensor:
        """Returns the patch tokens of (B, N, C) as a plane (B, C, H, W); a view."""
        plane: Tensor = x[:, self.num_prefix :].mT.unflatten(2, self.size)
        return plane

    def map_patches(self, change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Applies a function (B, C, H, W) -> (B, C', H', W') to the patches of tokens (B, N, C), not to the prefix."""
        changed = change(self.plane(x)).flatten(2).mT
        return torch.cat([x[:, : self.num_prefix], changed], dim=1) if self.num_prefix else changed


class Packed:
    """Positions of the tokens of images of several sizes in one row, (1, T, C), without padding.

    Images of equal size are side by side, in the order in which they are given, and are one group: its part of the
    row is a view (n, N, C) of n images of one `Grid`. What works token by token is called with the whole row; what
    mixes tokens is called with each group.

    Args:
        sizes: Patch grid (H, W) of each image.
        num_prefix: Class and register tokens before the patch tokens of each image.

    Attributes:
        order: Numbers of the images in the order of the row.
        groups: For each group the `Grid` of its images and their number n.
        lengths: Tokens of each image, prefix included, in the order of the row.

    Example:
        >>> packed = Packed([(4, 4), (2, 3), (4, 4)], num_prefix=1)
        >>> packed.order, packed.lengths, packed.offsets
        ((1, 0, 2), (7, 17, 17), (0, 7, 24, 41))
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], num_prefix: int = 0) -> None:
        if not sizes:
            raise UserError("a pack needs at least one image; got none")
        self.sizes = [(int(height), int(width)) for height, width in sizes]
        self.num_prefix = num_prefix
        self.groups = [(Grid(size, num_prefix=num_prefix), n) for size, n in sorted(Counter(self.sizes).items())]
        for grid, _ in self.groups:
            grid.check()
        self.order = tuple(sorted(range(len(sizes)), key=self.sizes.__getitem__))
        self.lengths = tuple(grid.num_queries for grid, n in self.groups for _ in range(n))
        self._parts = [grid.num_queries * n for grid, n in self.groups]

    def __repr__(self) -> str:
        return f"Packed({self.sizes}, num_prefix={self.num_prefix})"

    @property
    def num_queries(self) -> int:
        """Tokens T of all images."""
        return sum(self._parts)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Places where the images begin in the row, and T."""
        return tuple(sum(self.lengths[:i]) for i in range(len(self.lengths) + 1))

    def split(self, x: Tensor) -> list[Tensor]:
        """Returns each group's part of a row, as views: (1, T, C) as (n, N, C), or (1, h, T, d) as (n, h, N, d)."""
        rows = x.split(self._parts, -2)  # one node of autograd: slices would each have a gradient of all T tokens
        counted = zip(rows, self.groups, strict=True)
        if x.ndim == 3:
            return [row[0].unflatten(0, (n, -1)) for row, (_, n) in counted]
        return [row[0].unflatten(1, (n, -1)).transpose(0, 1) for row, (_, n) in counted]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins parts of groups to a row: (n, N, C) to (1, T, C), or (n, h, N, d) to (1, h, T, d)."""
        if parts[0].ndim == 3:
            return torch.cat([part.flatten(0, 1) for part in parts])[None]
        return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])[None].transpose(1, 2)

    def map_images(self, change: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Calls `change(*parts, grid)` with each group's parts of some rows, and joins what it returns."""
        parts = zip(*map(self.split, rows), strict=True)
        return self.join([change(*part, grid) for part, (grid, _) in zip(parts, self.groups, strict=True)])

    def map_patches(self, change: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Applies a function of planes to the patches of each image of a row (1, T, C); see `Grid.map_patches`."""
        return self.map_images(lambda part, grid: grid.map_patches(change, part), x)

    def table(self, of_grid: Callable[[Grid], Tensor]) -> Tensor:
        """Joins what a table (1, N, C) is on the grid of each image to a row (1, T, C)."""
        return self.join([of_grid(grid).expand(n, -1, -1) for grid, n in self.groups])

    def spread(self, values: Tensor) -> Tensor:
        """Repeats a value (B, C) of each image, in the order in which they were given, for its tokens: (1, T, C)."""
        lengths = torch.tensor(self.lengths, device=values.device)
        return values[list(self.order)].repeat_interleave(lengths, 0, output_size=self.num_queries)[None]

    def restore(self, values: Tensor) -> Tensor:
        """Brings values (B, ...) in the order of the row into the order in which the images were given."""
        return values[sorted(range(len(self.order)), key=self.order.__getitem__)]
