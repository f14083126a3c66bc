"""Checks shapes of outputs at all sizes, in one instance and in several, resized tables, views, and NaN."""

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.testing.attention.inputs import NOMINAL, SECOND, AttentionSubject, inputs
from linvit.testing.numbers import EXACT, relative_error
from linvit.testing.report import at, judged, message, not_declared, not_supported, require
from linvit.testing.subject import sized

GRIDS = [NOMINAL, SECOND, Grid((1, 50)), Grid((50, 1)), Grid((13, 31))]
OLD, NEW = Grid((18, 18)), Grid((16, 17))
"""Both have more patches than Linformer's 256 rows, which further patches do not change; the new one has fewer, so
that tables whose first entries are used are also tested."""


def shape(subject: AttentionSubject) -> str:
    """Checks for shape (B, h, N, out_dim / h) and the values' dtype, for batches and one image, in every precision."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        mechanism = subject.build(dtype=dtype)
        for batch in (1, 3):
            with at(name):
                out = inputs(mechanism, NOMINAL, batch=batch, dtype=dtype)(mechanism)
            _check_shape(out, mechanism, NOMINAL, batch)
            require(out.dtype == dtype, f"{name} in, {str(out.dtype).removeprefix('torch.')} out")
    return f"{tuple(out.shape)} for 3 images of {sized(NOMINAL)} in 4 dtypes"


def grids(subject: AttentionSubject) -> str:
    """Checks one instance per grid: square or not, one row, one column, odd sides."""
    refused = []
    for grid in GRIDS:
        try:
            check_output(subject.build(grid), grid)
        except UserError as error:
            refused.append(f"{sized(grid)}: {message(error)}")
    if refused:
        raise not_supported("; ".join(refused))
    return ", ".join(map(sized, GRIDS))


def another_size(subject: AttentionSubject) -> str:
    """Checks one instance at all grids in turn: each call gives the same as a first call, or rejects its size."""
    mechanism = subject.build()
    given = inputs(mechanism, NOMINAL)
    before = given(mechanism)
    refused = []
    for grid in GRIDS[1:]:
        size = sized(grid)
        try:
            check_output(mechanism, grid, f" of an instance for {sized(NOMINAL)}")
            there = inputs(mechanism, grid)
            changed = relative_error(there(mechanism), there(subject.build()))
        except UserError as error:
            require(size in str(error), f"{size} is rejected by a message that does not contain it: {message(error)}")
            refused.append(f"{size}: {message(error)}")
            continue
        said = f"earlier calls change the output by {changed:.0e} (at most {EXACT:.0e}) at {size}"
        require(changed <= EXACT, f"{said} of an instance for {sized(NOMINAL)}")
    left = relative_error(given(mechanism), before)
    judged(left, f"calls at other sizes change the output at {sized(NOMINAL)} by {left:.0e}")
    if refused:
        raise not_supported("; ".join(refused))
    return f"{', '.join(map(sized, GRIDS[1:]))} through an instance for {sized(NOMINAL)}"


def resizes_its_tables(subject: AttentionSubject) -> str:
    """Checks that a state dict of another grid fits after `resize_tables`, and computes the same at that grid."""
    old, new = subject.build(OLD), subject.build(NEW, seed=1)
    shapes = {name: tensor.shape for name, tensor in new.state_dict().items()}
    tables = [name for name, tensor in old.state_dict().items() if tensor.shape != shapes.get(name)]
    if not tables:
        return "no parameter has a shape that depends on the grid"
    state = new.resize_tables(old.state_dict(), lambda count: OLD.size if count == OLD.num_keys else None)
    for name in tables:
        require(
            name in shapes, f"{name} is there at {sized(OLD)} and not at {sized(NEW)}; let the grid decide shapes only"
        )
        got = tuple(state[name].shape) if name in state else "nothing"
        require(
            got == tuple(shapes[name]),
            f"{name} of {sized(OLD)} is {got} for {sized(NEW)} and should be {tuple(shapes[name])}, so weights of "
            f"another image size do not fit: override resize_tables",
        )
    new.load_state_dict(state)
    names = ", ".join(tables)
    try:
        want = inputs(old, NEW)(old)
    except UserError:
        return f"{names} from {sized(OLD)} to {sized(NEW)}"
    left = relative_error(inputs(new, NEW)(new), want)
    require(
        left <= EXACT,
        f"with {names} resized, the output at {sized(NEW)} differs by {left:.0e} from that of the instance for "
        f"{sized(OLD)} (at most {EXACT:.0e}); resize in resize_tables as in forward",
    )
    return f"{names} from {sized(OLD)} to {sized(NEW)}, where the output is the same to {left:.0e}"


def order_of_tokens(subject: AttentionSubject) -> str:
    """Checks that permuted tokens give permuted outputs, if the mechanism declares it."""
    mechanism = subject.build()
    if not mechanism.facts.equivariant:
        raise not_declared("equivariant is False")
    given = inputs(mechanism, NOMINAL)
    order = torch.randperm(NOMINAL.num_queries, generator=torch.Generator().manual_seed(0))
    error = relative_error(given.map(lambda x: x[..., order, :])(mechanism), given(mechanism)[..., order, :])
    return judged(error, f"tokens in another order: {error:.0e}")


def check_output(mechanism: Attention, grid: Grid, where: str = "") -> None:
    """Fails a clause if the shape of an output is wrong, or a number is not finite."""
    with at(sized(grid)):
        out = inputs(mechanism, grid)(mechanism)
    where = f" at {sized(grid)}{where}"
    _check_shape(out, mechanism, grid, 2, where)
    lost = int((~out.isfinite()).sum())
    require(not lost, f"{lost} of {out.numel()} outputs not finite{where}")


def _check_shape(out: Tensor, mechanism: Attention, grid: Grid, batch: int, where: str = "") -> None:
    heads = mechanism.out_heads
    want = (batch, heads, grid.num_queries, mechanism.out_dim // heads)
    require(tuple(out.shape) == want, f"shape {tuple(out.shape)} instead of {want}{where}")
