"""Shapes of outputs, at all sizes, of one instance and of several."""

import contextlib

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.testing.attention.inputs import HALF, NOMINAL, SECOND, AttentionSubject, inputs
from linvit.testing.numbers import EXACT, relative_error
from linvit.testing.report import Advice, Line, at, failed, message, not_supported, passed
from linvit.testing.subject import sized

GRIDS = [NOMINAL, SECOND, Grid((1, 50)), Grid((50, 1)), Grid((13, 31))]
TAKE_THE_SIZE = Advice("it works at 14x14, so take the size from grid and not from the number of tokens")
FOLLOW = Advice("take all sizes from the grid of the call, or refuse it by a linvit.UserError that names it, as 7x9")


def shape(subject: AttentionSubject) -> Line:
    """Checks for (B, h, N, out_dim / h) in the values' dtype, for a batch and for one image, in every precision."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        mechanism = subject.build(dtype=dtype)
        for batch in (1, 3):
            with at(_name(dtype)), at(HALF) if dtype.itemsize == 2 else contextlib.nullcontext():
                out = inputs(mechanism, NOMINAL, batch=batch, dtype=dtype)(mechanism)
            wrong = wrong_shape(out, mechanism, NOMINAL, batch)
            if wrong:
                return failed(wrong)
            if out.dtype != dtype:
                return failed(f"{_name(dtype)} in, {_name(out.dtype)} out")
    return passed(f"{tuple(out.shape)} for 3 images of {sized(NOMINAL)} in 4 dtypes")


def grids(subject: AttentionSubject) -> Line:
    """Checks an instance for each grid: square or not, one row, one column, odd sides."""
    refused = []
    for grid in GRIDS:
        try:
            with at(TAKE_THE_SIZE) if grid != NOMINAL else contextlib.nullcontext():
                wrong = wrong_output(subject.build(grid), grid)
        except UserError as error:
            refused.append(f"{sized(grid)}: {message(error)}")
            continue
        if wrong:
            return failed(f"{wrong} at {sized(grid)}" + (f"; {TAKE_THE_SIZE}" if grid != NOMINAL else ""))
    return not_supported("; ".join(refused)) if refused else passed(", ".join(map(sized, GRIDS)))


def another_size(subject: AttentionSubject) -> Line:
    """Checks one instance at every grid in turn: each call is as the first would be, or is refused by its size."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    before = given(mechanism)
    refused = []
    for grid in GRIDS[1:]:
        size = sized(grid)
        try:
            with at(FOLLOW):
                wrong = wrong_output(mechanism, grid) or _memory(subject, mechanism, grid)
        except UserError as error:
            if size not in str(error):
                return failed(f"{size} is refused in words that do not name it: {message(error)}")
            refused.append(f"{size}: {message(error)}")
            continue
        if wrong:
            return failed(f"{wrong} at {size} of an instance for {sized(NOMINAL)}")
    left = relative_error(given(mechanism), before)
    if not left <= EXACT:
        return failed(f"calls at other sizes change the output at {sized(NOMINAL)} by {left:.0e} (at most {EXACT:.0e})")
    sizes = ", ".join(map(sized, GRIDS[1:]))
    return not_supported("; ".join(refused)) if refused else passed(f"{sizes} through an instance for {sized(NOMINAL)}")


def wrong_shape(out: Tensor, mechanism: Attention, grid: Grid, batch: int) -> str:
    """Says what is wrong with an output's shape, if anything."""
    heads = mechanism.num_heads
    want = (batch, heads, grid.num_queries, mechanism.out_dim // heads)
    return "" if tuple(out.shape) == want else f"shape {tuple(out.shape)} instead of {want}"


def wrong_output(mechanism: Attention, grid: Grid) -> str:
    """Says what is wrong with the shape or the numbers of an output, if anything."""
    with at(sized(grid)):
        out = inputs(mechanism, grid)(mechanism)
    wrong = wrong_shape(out, mechanism, grid, 2)
    lost = int((~out.isfinite()).sum())
    return wrong or (f"{lost} of {out.numel()} outputs not finite" if lost else "")


def _memory(subject: AttentionSubject, mechanism: Attention, grid: Grid) -> str:
    """Says how earlier calls change the output at a grid, if they do."""
    given = inputs(mechanism, grid)
    error = relative_error(given(mechanism), given(subject.build()))
    return "" if error <= EXACT else f"earlier calls change the output by {error:.0e} (at most {EXACT:.0e})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
