"""Shapes of outputs at all sizes, of one instance and of several, tables of another size, views, and NaN."""

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.testing.attention.inputs import NOMINAL, SECOND, AttentionSubject, inputs
from linvit.testing.numbers import EXACT, relative_error
from linvit.testing.report import (
    Line,
    at,
    failed,
    judged,
    message,
    not_declared,
    not_supported,
    passed,
    refusable,
)
from linvit.testing.subject import sized

GRIDS = [NOMINAL, SECOND, Grid((1, 50)), Grid((50, 1)), Grid((13, 31))]
OLD, NEW = Grid((18, 18)), Grid((16, 17))
"""Both have more patches than Linformer's 256 rows, which more patches cannot change; the new one has fewer, so that
tables of which a mechanism takes the first entries follow, too."""


def shape(subject: AttentionSubject) -> Line:
    """Checks for (B, h, N, out_dim / h) in the values' dtype, for a batch and for one image, in every precision."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        mechanism = subject.build(dtype=dtype)
        for batch in (1, 3):
            with at(_name(dtype)):
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
            wrong = wrong_output(subject.build(grid), grid)
        except UserError as error:
            refused.append(f"{sized(grid)}: {message(error)}")
            continue
        if wrong:
            return failed(f"{wrong} at {sized(grid)}")
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
            wrong, there = wrong_output(mechanism, grid), inputs(mechanism, grid)
            changed = relative_error(there(mechanism), there(subject.build()))
        except UserError as error:
            if size not in str(error):
                return failed(f"{size} is refused in words that do not name it: {message(error)}")
            refused.append(f"{size}: {message(error)}")
            continue
        if not wrong and not changed <= EXACT:
            wrong = f"earlier calls change the output by {changed:.0e} (at most {EXACT:.0e})"
        if wrong:
            return failed(f"{wrong} at {size} of an instance for {sized(NOMINAL)}")
    left = relative_error(given(mechanism), before)
    if not left <= EXACT:
        return failed(f"calls at other sizes change the output at {sized(NOMINAL)} by {left:.0e} (at most {EXACT:.0e})")
    sizes = ", ".join(map(sized, GRIDS[1:]))
    return not_supported("; ".join(refused)) if refused else passed(f"{sizes} through an instance for {sized(NOMINAL)}")


@refusable
def resizes_its_tables(subject: AttentionSubject) -> Line:
    """A state dict of another grid fits after `resize_tables`, and computes what the old instance computes there."""
    old, new = subject.build(OLD), subject.build(NEW, seed=1)
    shapes = {name: tensor.shape for name, tensor in new.state_dict().items()}
    tables = [name for name, tensor in old.state_dict().items() if tensor.shape != shapes.get(name)]
    if not tables:
        return passed("no parameter has a shape that depends on the grid")
    state = new.resize_tables(old.state_dict(), lambda count: OLD.size if count == OLD.num_keys else None)
    for name in tables:
        if name not in shapes:
            return failed(f"{name} is there at {sized(OLD)} and not at {sized(NEW)}; let the grid decide shapes only")
        if name not in state or state[name].shape != shapes[name]:
            got = f"{tuple(state[name].shape)}" if name in state else "nothing"
            return failed(
                f"{name} of {sized(OLD)} is {got} for {sized(NEW)} and should be {tuple(shapes[name])}, so weights of "
                f"another image size do not fit: override resize_tables"
            )
    new.load_state_dict(state)
    names = ", ".join(tables)
    try:
        want = inputs(old, NEW)(old)
    except UserError:
        return passed(f"{names} from {sized(OLD)} to {sized(NEW)}")
    left = relative_error(inputs(new, NEW)(new), want)
    if not left <= EXACT:
        return failed(
            f"with {names} resized, the output at {sized(NEW)} differs by {left:.0e} from that of the instance for "
            f"{sized(OLD)} (at most {EXACT:.0e}); resize in resize_tables as in forward"
        )
    return passed(f"{names} from {sized(OLD)} to {sized(NEW)}, where the output is the same to {left:.0e}")


def memory_layout(subject: AttentionSubject) -> Line:
    """Checks that views of a fused projection give the same as contiguous tensors."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    views = given.map(lambda x: x.transpose(1, -1).contiguous().transpose(1, -1))
    error = relative_error(views(mechanism), given(mechanism))
    return judged(error, f"contiguous or not: {error:.0e}")


def order_of_tokens(subject: AttentionSubject) -> Line:
    """Checks that tokens in another order give the same outputs in that order, where the mechanism declares it."""
    mechanism = subject.build()
    if not mechanism.equivariant:
        return not_declared("equivariant is False")
    given = inputs(mechanism, NOMINAL)
    order = torch.randperm(NOMINAL.num_queries, generator=torch.Generator().manual_seed(0))
    moved = given.map(lambda x: x[..., order, :])
    error = relative_error(moved(mechanism), given(mechanism)[..., order, :])
    said = f"tokens in another order: {error:.0e}"
    return passed(said) if error <= EXACT else failed(f"{said} (at most {EXACT:.0e}); declare equivariant = False")


def nan_propagates(subject: AttentionSubject) -> Line:
    """Checks that a NaN in an input comes out as NaN, in its own sample alone, and that the backward pass runs."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    clean = given(mechanism).detach()
    counts = {}
    for name, tensor in given.named.items():
        for every in (False, True):
            spoilt = tensor.clone()
            spoilt[0].fill_(torch.nan) if every else spoilt[0].view(-1)[:1].fill_(torch.nan)
            with at(f"{'all' if every else 'a'} NaN in {name}"):
                out = given.replace(**{name: spoilt}).map(lambda x: x.requires_grad_())(mechanism)
                out.sum().backward()
            counts[name] = int(out[0].isnan().sum())
            if not counts[name]:
                return failed(f"a NaN in {name} disappears")
            if not relative_error(out[1], clean[1]) <= EXACT:
                return failed(f"a NaN in {name} of one sample changes another sample")
    return passed(", ".join(f"NaN in {name} gives {count}" for name, count in counts.items()))


def wrong_shape(out: Tensor, mechanism: Attention, grid: Grid, batch: int) -> str:
    """Says what is wrong with an output's shape, if anything."""
    heads = mechanism.out_heads
    want = (batch, heads, grid.num_queries, mechanism.out_dim // heads)
    return "" if tuple(out.shape) == want else f"shape {tuple(out.shape)} instead of {want}"


def wrong_output(mechanism: Attention, grid: Grid) -> str:
    """Says what is wrong with the shape or the numbers of an output, if anything."""
    with at(sized(grid)):
        out = inputs(mechanism, grid)(mechanism)
    wrong = wrong_shape(out, mechanism, grid, 2)
    lost = int((~out.isfinite()).sum())
    return wrong or (f"{lost} of {out.numel()} outputs not finite" if lost else "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
