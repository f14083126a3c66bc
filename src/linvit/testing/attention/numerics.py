"""Finite outputs and gradients in every precision."""

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
from linvit.testing.attention.inputs import HALF, AttentionSubject, Inputs, flat, inputs
from linvit.testing.numbers import gradients_of, trainable
from linvit.testing.report import Line, at, failed, message, not_supported, passed

CASES: dict[str, Callable[[Tensor], Tensor]] = {
    **{f"scale 2^{power}": partial(torch.mul, other=2.0**power) for power in (-10, -5, 0, 3, 6)},
    "tokens alike": flat,
}
SIDES = (1, 7, 14, 56)  # N = 1, 49, 196, 3136
MARGIN = 4
"""A tensor may overflow if float64 has an entry above the dtype's largest number over this: rounded inputs change the
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
    """A mechanism, its inputs and its results."""

    mechanism: Attention
    given: Inputs
    results: dict[str, Tensor]


def finite(precision: Precision) -> Callable[[AttentionSubject], Line]:
    """Returns the check that outputs and gradients are finite, unless the true ones are beyond the dtype's range."""

    def check(subject: AttentionSubject) -> Line:
        values, refused, sizes = 0, set(), set()
        for side in sides(subject):
            for name, change in CASES.items():
                with at(f"N={side * side}, {name}"), advice(precision):
                    try:
                        run = run_at(subject, precision, side, change)
                    except UserError as error:
                        refused.add(f"not N={side * side}: {message(error)}")
                        break
                    lost = _lost(run, precision)
                    if lost:
                        return failed(f"{lost} at N={side * side}, {name}")
                values += sum(tensor.numel() for tensor in run.results.values())
                sizes.add(side * side)
        said = f"{values} outputs and gradients, N in {sorted(sizes)}, {', '.join(CASES)}"
        return not_supported("; ".join([*sorted(refused), said])) if refused else passed(said)

    return check


def advice(precision: Precision) -> contextlib.AbstractContextManager[object]:
    """Adds to an exception in half precision what to do about it."""
    return contextlib.nullcontext() if precision.dtype == torch.float32 else at(HALF)


def sides(subject: AttentionSubject) -> tuple[int, ...]:
    """Returns the sides of the square grids; a quick run leaves out the largest."""
    return SIDES[:-1] if subject.quick else SIDES


def run_at(subject: AttentionSubject, precision: Precision, side: int, change: Callable[[Tensor], Tensor]) -> Run:
    """Runs a mechanism on unit inputs after a change; returns output and gradients of a random scalar of it."""
    grid = Grid((side, side))
    mechanism = subject.build(grid, torch.float32 if precision.autocast else precision.dtype)
    unit = inputs(mechanism, grid, batch=1).map(change)
    given = unit.map(lambda x: x.to(precision.dtype))
    if precision.autocast:
        # The layer's input does not come from a projection, so autocast leaves it in float32.
        wide = unit.map(Tensor.float)
        given = given._replace(extra=wide.extra, q=wide.q if mechanism.projections == "kv" else given.q)
    context = torch.autocast("cpu", precision.dtype) if precision.autocast else contextlib.nullcontext()
    return Run(mechanism, given, _results(mechanism, given, context))


def _results(
    mechanism: Attention, given: Inputs, context: contextlib.AbstractContextManager[object]
) -> dict[str, Tensor]:
    """Returns the output, and the gradient of each input and parameter that one reaches."""
    given = given.map(lambda x: x.detach().requires_grad_())
    with context:
        out = given(mechanism)
    found = gradients_of(out, given.named | trainable(mechanism))
    reached = {f"gradient of {name}": gradient for name, gradient in found.items() if gradient is not None}
    return {"output": out.detach(), **reached}


def exact_results(run: Run, change: Callable[[Tensor], Tensor] = torch.clone) -> dict[str, Tensor]:
    """Returns the same results in float64, from the same rounded inputs and parameters after a change."""
    mechanism = copy.deepcopy(run.mechanism).double()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.copy_(change(parameter))
    return _results(mechanism, run.given.map(lambda x: change(x.double())), contextlib.nullcontext())


def _lost(run: Run, precision: Precision) -> str:
    """Says what is not finite although it fits into the dtype in float64, if anything is."""
    if all(tensor.isfinite().all() for tensor in run.results.values()):
        return ""
    for name, exact in exact_results(run).items():
        tensor, largest = run.results[name], float(exact.abs().max())
        beyond = largest > torch.finfo(tensor.dtype).max / MARGIN
        lost = int((~tensor.isfinite()).sum())
        if lost and not beyond:
            count = f"{name}: {lost} of {tensor.numel()} not finite"
            if not math.isfinite(largest):
                return f"{count}, nor in float64: look for a division by 0, a root or a logarithm of 0,"
            said = f"{count}, though float64 gives at most {largest:.1e}"
            return said if precision.dtype == torch.float32 else f"{said} ({HALF})"
        if name == "output" and beyond:
            break  # and may take the gradients with it
    return ""
