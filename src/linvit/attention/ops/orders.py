"""Orders in which recurrent mechanisms read the tokens of a grid; the prefix comes first in each."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.base import Grid


def columns(grid: Grid, device: torch.device) -> Tensor:
    """Returns numbers of the tokens, column by column, (N,)."""
    return _with_prefix(_places(grid, device).mT, grid)


def boustrophedon(grid: Grid, device: torch.device, by_columns: bool = False) -> Tensor:
    """Returns numbers of the tokens row by row, or column by column, every second one backwards, (N,)."""
    places = _places(grid, device).mT if by_columns else _places(grid, device)
    backwards = torch.arange(places.shape[0], device=device)[:, None] % 2 == 1
    return _with_prefix(torch.where(backwards, places.flip(1), places), grid)


def _places(grid: Grid, device: torch.device) -> Tensor:
    height, width = grid.size
    return grid.num_prefix + torch.arange(height * width, device=device).view(height, width)


def _with_prefix(places: Tensor, grid: Grid) -> Tensor:
    return torch.cat([torch.arange(grid.num_prefix, device=places.device), places.flatten()])


def chunked(x: Tensor, length: int) -> Tensor:
    """Returns tokens of (..., N, d) in n chunks of a length, (..., n, length, d), with zeros behind the last."""
    chunks = (x.shape[-2] + length - 1) // length  # ONNX rounds quotients of negative numbers towards zero
    missing = chunks * length - x.shape[-2]
    padded = F.pad(x, (0, 0, 0, missing)) if missing else x
    return padded.unflatten(-2, (chunks, length))  # type: ignore[no-any-return]


def both_directions(scan: Callable[..., Tensor], *given: Tensor, order: Tensor | None = None) -> Tensor:
    """Returns the sum of `scan` over tokens (B, h, N, ...) in both directions, (B, h, N, d).

    It reads them in an order (N,) of their numbers, or unchanged; its output has the order of the grid.
    """
    if order is not None:
        given = tuple(x[:, :, order] for x in given)
    out = scan(*given) + scan(*(x.flip(2) for x in given)).flip(2)
    return out if order is None else out[:, :, order.argsort()]
