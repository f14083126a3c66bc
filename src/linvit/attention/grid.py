"""Positions of the tokens of images of one size."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from linvit.errors import check_number


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
