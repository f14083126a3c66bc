"""Orders in which recurrent mechanisms read the tokens of a grid; the prefix comes first in each."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.attention.ops.functional import is_exporting


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
    chunks += is_exporting()  # torch.export fixes a size that it sees as 1
    missing = chunks * length - x.shape[-2]
    padded = F.pad(x, (0, 0, 0, missing)) if is_exporting() or missing else x
    return padded.unflatten(-2, (chunks, length))  # type: ignore[no-any-return]


def over_chunks(step: Callable[..., tuple[Tensor, Tensor]], state: Tensor, *given: Tensor) -> Tensor:
    """Returns the second outputs (B, h, n, ...) of `state, out = step(state, *chunk)` over chunks of (B, h, n, ...)."""
    if is_exporting():  # a loop for any number of chunks
        from torch._higher_order_ops.scan import scan  # which has no public name yet

        chunks = tuple(x.movedim(2, 0) for x in given)
        out: Tensor = scan(lambda state, chunk: step(state.clone(), *chunk), state, chunks)[1]
        return out.movedim(0, 2)
    outs = []
    for chunk in zip(*(x.unbind(2) for x in given), strict=True):  # the gradient of an index is as large as all
        state, out = step(state, *chunk)
        outs.append(out)
    return torch.stack(outs, 2)


def both_directions(read: Callable[..., Tensor], *given: Tensor, order: Tensor | None = None) -> Tensor:
    """Returns the sum of `read` over tokens (B, h, N, ...) in both directions, (B, h, N, d).

    It reads them in an order (N,) of their numbers, or unchanged; its output has the order of the grid.
    """
    if order is not None:
        given = tuple(x[:, :, order] for x in given)
    images = given[0].shape[0]
    both = read(*(torch.cat([x, x.flip(2)]) for x in given))
    out = both[:images] + both[images:].flip(2)
    return out if order is None else out[:, :, order.argsort()]
