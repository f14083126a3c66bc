"""Precision: nothing overflows or underflows to NaN, and how far each precision is from float64."""

import contextlib
import copy
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.testing.attention.inputs import Inputs, Subject, flat, inputs, normal, relative_error
from linvit.testing.report import Finding, at, failed, not_supported, passed, place

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"scale 2^{power}": partial(torch.mul, other=2.0**power) for power in (-10, -5, 0, 3, 6)},
    "tokens alike": flat,
}
SIDES = (1, 7, 14, 56)  # N = 1, 49, 196, 3136
FAR_OFF = 10
"""An error fails beyond this many times its goal. The goals themselves are only reported: a normaliser near 0 costs a
digit, a sum in half precision costs two."""
MARGIN = 4
"""A tensor may overflow if float64 has an entry beyond the dtype's largest number over this: rounded inputs move the
entries of a saturated softmax by that much."""


class Precision(NamedTuple):
    """One way of running a mechanism.

    Attributes:
        name: What reports call it.
        dtype: Of the queries, keys and values.
        autocast: Whether parameters and layer input are float32, under autocast to `dtype`; else all is in `dtype`.
        goal: Relative error against float64 to aim at, on inputs of unit scale: of the order of the dtype's epsilon
            for half precision, and of 1e3 times it for float32, whose place an ill-conditioned inverse may need.
    """

    name: str
    dtype: torch.dtype
    autocast: bool
    goal: float


PRECISIONS = (
    Precision("float32", torch.float32, False, 1e-4),
    Precision("bfloat16", torch.bfloat16, False, 1e-2),
    Precision("float16", torch.float16, False, 2e-3),
    Precision("autocast bfloat16", torch.bfloat16, True, 1e-2),
    Precision("autocast float16", torch.float16, True, 2e-3),
)


class Run(NamedTuple):
    """A mechanism at one size and scale, and what came out of it."""

    mechanism: Attention
    grid: Grid
    given: Inputs
    results: dict[str, Tensor]


def finite(precision: Precision) -> Callable[[Subject], Finding]:
    """The check that no output and no gradient is NaN or infinite unless the true one is beyond the dtype's range."""

    def check(subject: Subject) -> Finding:
        values, refused, sizes = 0, set(), set()
        for side in _sides(subject):
            for name, change in CASES.items():
                with at(f"N={side * side}, {name}"):
                    try:
                        run = _run(subject, precision, side, change)
                    except UserError as error:
                        refused.add(f"not N={side * side}: {place(error)}")
                        break
                    lost = _lost(run)
                    if lost:
                        return failed(f"{lost} at N={side * side}, {name}")
                values += sum(tensor.numel() for tensor in run.results.values())
                sizes.add(side * side)
        said = f"{values} outputs and gradients, N in {sorted(sizes)}, {', '.join(CASES)}"
        return not_supported("; ".join([*sorted(refused), said])) if refused else passed(said)

    return check


def error(precision: Precision) -> Callable[[Subject], Finding]:
    """The check that reports the relative error against float64 on inputs of unit scale."""

    def check(subject: Subject) -> Finding:
        limit = FAR_OFF * precision.goal
        said, outputs, refused = [], [], []
        for side in _sides(subject)[2:]:
            with at(f"N={side * side}"):
                try:
                    run = _run(subject, precision, side, torch.clone)
                except UserError as error:
                    refused.append(f"not N={side * side}: {place(error)}")
                    continue
                exact = _exact(run)
            errors = {name: relative_error(tensor, exact[name]) for name, tensor in run.results.items()}
            outputs.append(errors.pop("output"))
            said.append(f"output {outputs[-1]:.1e}, gradients {max(errors.values(), default=0):.1e} at N={side * side}")
        note = f"{'; '.join([*refused, *said])}; goal for outputs {precision.goal:.0e}"
        if not all(output <= limit for output in outputs):
            return failed(f"{note}, at most {limit:.0e}")
        return not_supported(note) if refused else passed(note)

    return check


def _sides(subject: Subject) -> tuple[int, ...]:
    return SIDES[:-1] if subject.quick else SIDES


def _run(subject: Subject, precision: Precision, side: int, change: Callable[[Tensor], Tensor]) -> Run:
    """The output and the gradients of all inputs and parameters for a random scalar of it, on changed unit inputs."""
    grid = Grid((side, side))
    mechanism = subject.build(grid, torch.float32 if precision.autocast else precision.dtype)
    unit = inputs(mechanism, grid, batch=1).map(change)
    given = unit.map(lambda x: x.to(precision.dtype))
    if precision.autocast:
        # The layer's input is no product of a projection, so autocast leaves it in float32.
        wide = unit.map(Tensor.float)
        given = given._replace(extra=wide.extra, **({"q": wide.q} if mechanism.projections == "kv" else {}))
    context = torch.autocast("cpu", precision.dtype) if precision.autocast else contextlib.nullcontext()
    return Run(mechanism, grid, given, _results(mechanism, grid, given, context))


def _results(
    mechanism: Attention, grid: Grid, given: Inputs, context: contextlib.AbstractContextManager[object]
) -> dict[str, Tensor]:
    """The output, and the gradient of each input and parameter that one reaches."""
    given = given.map(lambda x: x.detach().requires_grad_())
    with context:
        out = given(mechanism, grid)
    sources = given.named | {name: p for name, p in mechanism.named_parameters() if p.requires_grad}
    probe = normal(*out.shape, seed=9).to(out.dtype)
    found = torch.autograd.grad(out, list(sources.values()), probe, allow_unused=True)
    reached = {f"gradient of {name}": g for name, g in zip(sources, found, strict=True) if g is not None}
    return {"output": out.detach(), **reached}


def _exact(run: Run) -> dict[str, Tensor]:
    """The same in float64, from the same inputs and parameters as rounded."""
    twin = copy.deepcopy(run.mechanism).double()
    return _results(twin, run.grid, run.given.map(Tensor.double), contextlib.nullcontext())


def _lost(run: Run) -> str:
    """What is not finite although float64 says that it fits into the dtype, or nothing."""
    if all(tensor.isfinite().all() for tensor in run.results.values()):
        return ""
    for name, exact in _exact(run).items():
        tensor, largest = run.results[name], float(exact.abs().max())
        beyond = largest > torch.finfo(tensor.dtype).max / MARGIN
        lost = int((~tensor.isfinite()).sum())
        if lost and not beyond:
            theirs = "float64 neither" if math.isnan(largest) else f"though float64 gives at most {largest:.1e}"
            return f"{name}: {lost} of {tensor.numel()} not finite, {theirs}"
        if name == "output" and beyond:
            break  # and may take the gradients with it
    return ""
