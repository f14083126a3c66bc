"""Checks outputs and gradients in every precision: finite, and close to those of float64."""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from linvit.attention.base import Attention, Grid
from linvit.errors import UserError
from linvit.testing.attention.inputs import AttentionSubject, Inputs, flat, inputs
from linvit.testing.numbers import gradients_of, relative_error, sortable, trainable
from linvit.testing.report import at, message, not_supported, require

UNIT = "scale 2^0"
CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens alike": flat,
    **{f"scale 2^{power}": partial(torch.mul, other=2.0**power) for power in (-10, 0, 6, -5, 3)},
}
QUICK = 4  # number of cases of a quick run, the first ones
SIDES = (1, 7, 14, 56)  # N = 1, 49, 196, 3136
COMPARED = SIDES[2:]
MARGIN = 4
"""A tensor may overflow if float64 has an entry above the dtype's maximum divided by this: rounding the inputs changes
the entries of a saturated softmax by that factor."""
FAR_OFF = 10
"""An error fails if it exceeds its goal by this factor, and also the effect of rounding the inputs in float64 by this
factor. A normaliser near 0 costs a digit, a sum in half precision costs two."""
DRAWS = 3
TINY = torch.finfo(torch.float64).tiny


class Precision(NamedTuple):
    """Precision of a run: in `dtype`, or with parameters and layer input in float32 under autocast to it.

    The goal is a relative error against float64 on inputs of unit scale: of the order of the dtype's epsilon for half
    precision, and 1e3 times epsilon for float32, which an ill-conditioned inverse may need.
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


class Outcome(NamedTuple):
    """Mechanism, inputs and results."""

    mechanism: Attention
    given: Inputs
    results: dict[str, Tensor]


def numerics(precision: Precision) -> Callable[[AttentionSubject], str]:
    """Returns the check that outputs and gradients are finite at every size and scale, and close to those of float64.

    They need not be finite where the exact values exceed the dtype's range. They are compared on inputs of unit scale.
    A function may be ill-conditioned (a quotient of sums near 0, the corner of a ReLU). This is measured in float64:
    inputs and parameters are changed at random by as much as the precision rounds them. The errors of a stable
    algorithm are at most a few times this effect.
    """

    def check(subject: AttentionSubject) -> str:
        values, refused, notes = 0, set(), []
        sizes = SIDES[:-1] if subject.quick else SIDES
        for side in sizes:
            for name, change in itertools.islice(CASES.items(), QUICK if subject.quick else None):
                place = f"N={side * side}, {name}"
                with at(place):
                    try:
                        run = run_at(subject, precision, side, change)
                    except UserError as error:
                        refused.add(f"not N={side * side}: {message(error)}")
                        break
                    wrong, far = _lost(run), ""
                    if not wrong and name == UNIT and side in COMPARED:
                        wrong, far = _far_off(run, precision)
                require(not wrong, f"{wrong} at {place}")
                notes += [f"{far} at N={side * side}"] * bool(far)
                values += sum(tensor.numel() for tensor in run.results.values())
        notes = [*sorted(refused), *notes, f"goal {precision.goal:.0e}", f"{values} finite outputs and gradients"]
        if refused:
            raise not_supported("; ".join(notes))
        return "; ".join(notes)

    return check


def run_at(subject: AttentionSubject, precision: Precision, side: int, change: Callable[[Tensor], Tensor]) -> Outcome:
    """Runs a mechanism on unit inputs after a change; returns output and gradients of a random scalar of the output."""
    grid = Grid((side, side))
    mechanism = subject.build(grid, torch.float32 if precision.autocast else precision.dtype)
    unit = inputs(mechanism, grid, batch=1).map(change)
    given = unit.map(lambda x: x.to(precision.dtype))
    if precision.autocast:
        # The layer's input is not a projection, so autocast leaves it in float32.
        wide = ("x", "q") if mechanism.host.project == "kv" else ("x",)
        given = given.replace(**{name: x.float() for name, x in unit.named.items() if name in wide})
    context = torch.autocast("cpu", precision.dtype) if precision.autocast else contextlib.nullcontext()
    return Outcome(mechanism, given, _results(mechanism, given, context))


def _results(
    mechanism: Attention, given: Inputs, context: contextlib.AbstractContextManager[object]
) -> dict[str, Tensor]:
    """Returns the output, and the gradients of the inputs and parameters that have one."""
    given = given.map(lambda x: x.detach().requires_grad_())
    with context:
        out = given(mechanism)
    found = gradients_of(out, given.named | trainable(mechanism))
    reached = {f"gradient of {name}": gradient for name, gradient in found.items() if gradient is not None}
    return {"output": out.detach(), **reached}


def exact_results(run: Outcome, change: Callable[[Tensor], Tensor] = torch.clone) -> dict[str, Tensor]:
    """Returns the same results in float64, from the same rounded inputs and parameters after a change."""
    mechanism = copy.deepcopy(run.mechanism).double()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.copy_(change(parameter))
    return _results(mechanism, run.given.map(lambda x: change(x.double())), contextlib.nullcontext())


def _lost(run: Outcome) -> str:
    """Describes results that are not finite although float64 values fit into the dtype; "" if there are none."""
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
            return f"{count}, though float64 gives at most {largest:.1e}"
        if name == "output" and beyond:
            break  # gradients may fail as a consequence
    return ""


def _far_off(run: Outcome, precision: Precision) -> tuple[str, str]:
    """Describes results that are too far from float64 ("" if none are), and the largest errors."""
    exact = exact_results(run)
    errors = {name: relative_error(tensor, exact[name]) for name, tensor in run.results.items()}
    said = f"output {errors['output']:.1e}"
    gradients = [name for name in errors if name != "output"]
    if gradients:
        worst = max(gradients, key=lambda name: sortable(errors[name]))
        said += f", {worst} {errors[worst]:.1e}"
    if all(value <= FAR_OFF * precision.goal for value in errors.values()):
        return "", said
    rounding = _rounding_errors(run, exact, precision)
    limits = {name: FAR_OFF * max(precision.goal, rounding[name]) for name in errors}
    # If the output is wrong, its gradients are wrong as well.
    outside = "output" if not errors["output"] <= limits["output"] else ""
    worst = outside or max(errors, key=lambda name: sortable(errors[name] / limits[name]))
    said += f" (rounding alone moves {worst} by {rounding[worst]:.1e})"
    if errors[worst] <= limits[worst]:
        return "", said
    return f"{worst} differs from float64 by {errors[worst]:.1e}, at most {limits[worst]:.0e}", said


def _rounding_errors(run: Outcome, exact: dict[str, Tensor], precision: Precision) -> dict[str, float]:
    """Returns the relative error of each result that no algorithm can avoid, measured in float64.

    It is the maximum of three: the effect of rounding the inputs; the smallest number of the result's dtype; and
    float32's rounding of the output, which hides a gradient that should cancel to 0.
    """
    noise = torch.finfo(torch.float32).eps * float(exact["output"].abs().max())
    found = {}
    for name, tensor in exact.items():
        info = torch.finfo(run.results[name].dtype)
        found[name] = max(noise, info.smallest_normal * info.eps) / max(float(tensor.abs().max()), TINY)
    for seed in range(DRAWS):
        generator = torch.Generator().manual_seed(seed)

        def rounded(x: Tensor, generator: torch.Generator = generator) -> Tensor:
            noise = 2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1
            return x * (1 + torch.finfo(precision.dtype).eps * noise)

        for name, tensor in exact_results(run, rounded).items():
            found[name] = max(found[name], relative_error(tensor, exact[name]))
    return found
