"""Landmarks: means over parts of a sequence or of a grid of any size."""

import math
import operator

import torch
from torch import Tensor

from linvit.attention.base import Grid
from linvit.errors import UserError, check_number

DEFAULT_NUMBER = 64


class Landmarks:
    """The number of landmarks and the tokens that each is a mean of; the options are Nystrom attention's.

    Args:
        number: Landmarks m; None takes 64, or as many as the grid allows.
        kind: "segment": means of consecutive tokens; "pool2d": means of blocks of the grid, without prefix tokens.
        uneven: Where m does not divide the tokens: "t2t" makes parts of two lengths; "error" raises a `UserError`.
    """

    def __init__(self, number: int | None, kind: str, uneven: str) -> None:
        if number is not None:
            check_number("num_landmarks", number, at_least=1, whole=True, note=", or null for a default")
        self.number = number
        self.pool = kind == "pool2d"
        self.even = uneven == "error"

    def means(self, x: Tensor, count: int, size: tuple[int, int], num_prefix: int) -> Tensor:
        """Landmarks (B, h, m, dk) of the tokens (B, h, N, dk) of a grid."""
        if not self.pool:
            return segment_means(x, count, dim=2)
        rows, columns = divisions(count, size, self.even)[0]
        plane = x[:, :, num_prefix:].unflatten(2, size)  # (B, h, H, W, dk)
        return segment_means(segment_means(plane, columns, dim=3), rows, dim=2).flatten(2, 3)

    def count(self, grid: Grid) -> int:
        """The number of landmarks on a grid, the same for queries and keys.

        Raises:
            UserError: If the grid has fewer tokens than `number`, or they cannot be divided as asked for.
        """
        most = min(DEFAULT_NUMBER, self._most(grid))
        if self.number is not None:
            count = self.number
        elif self.pool and not self.even:
            count = next(m for m in range(most, 0, -1) if self._fits(m, grid))  # 1 always fits
        else:
            count = most
        if not self._fits(count, grid):
            raise UserError(self._misfit(count, grid))
        return count

    def _most(self, grid: Grid) -> int:
        """The largest number of landmarks: the queries or the keys, whichever are fewer."""
        return min(grid.num_queries, grid.num_keys) - (grid.num_prefix if self.pool else 0)

    def _fits(self, count: int, grid: Grid) -> bool:
        if self.pool:
            return all(divisions(count, size, self.even) for size in (grid.size, grid.keys_size))
        uneven = grid.num_queries % count or grid.num_keys % count
        return count <= self._most(grid) and not (self.even and uneven)

    def _misfit(self, count: int, grid: Grid) -> str:
        queries, keys = ("x".join(map(str, size)) for size in (grid.size, grid.keys_size))
        where = f"a grid of {queries} (keys {keys}) patches and {grid.num_prefix} prefix tokens"
        most = self._most(grid)
        if count > most:
            return f"num_landmarks {count} is more than the {most} tokens for them on {where}; use at most {most}"
        fitting = ", ".join(str(m) for m in range(1, most + 1) if self._fits(m, grid))
        parts = "blocks" if self.pool else "segments"
        equal = " of equal size" if self.even else ""
        return f"{where} cannot be divided into num_landmarks {count} {parts}{equal}; these numbers can: {fitting}"


def segment_means(x: Tensor, count: int, dim: int) -> Tensor:
    """Means over `count` consecutive segments of one dimension, the later ones one longer if it does not divide."""
    length = x.shape[dim]
    size = length // count
    shorter = (size + 1) * count - length  # segments of `size`; the others have `size + 1`
    first, last = x.split([shorter * size, length - shorter * size], dim)
    means: Tensor = first.unflatten(dim, (shorter, size)).mean(dim + 1)
    if shorter < count:
        means = torch.cat([means, last.unflatten(dim, (count - shorter, size + 1)).mean(dim + 1)], dim)
    return means


def divisions(count: int, size: tuple[int, int], even: bool) -> list[tuple[int, int]]:
    """The divisions of an H x W grid into a x b = `count` blocks, the squarest first; `even`: of one size."""
    height, width = map(operator.index, size)  # one graph per grid: torch.compile takes minutes for symbolic sizes
    ways = [(rows, count // rows) for rows in range(1, min(count, height) + 1) if count % rows == 0]
    ways = [(rows, columns) for rows, columns in ways if columns <= width]
    if even:
        ways = [(rows, columns) for rows, columns in ways if height % rows == 0 and width % columns == 0]
    return sorted(ways, key=lambda way: abs(math.log(height * way[1] / (width * way[0]))))
