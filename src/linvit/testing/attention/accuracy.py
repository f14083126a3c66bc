"""How far outputs and gradients in each precision are from those of float64."""

from collections.abc import Callable

import torch
from torch import Tensor

from linvit.errors import UserError
from linvit.testing.attention.inputs import HALF, AttentionSubject
from linvit.testing.attention.numerics import Precision, Run, advice, exact_results, run_at, sides
from linvit.testing.numbers import relative_error, sortable
from linvit.testing.report import Line, at, failed, message, not_supported, passed

FAR_OFF = 10
"""An error fails if it is more than this many times its goal, and more than this many times what rounding the inputs
changes in float64. A normaliser near 0 costs a digit, a sum in half precision costs two."""
DRAWS = 3
TINY = torch.finfo(torch.float64).tiny


def error(precision: Precision) -> Callable[[AttentionSubject], Line]:
    """Returns the check that outputs and gradients on inputs of unit scale are near those of float64.

    A function may be ill-conditioned (a quotient of sums near 0, the corner of a ReLU). This is measured: in float64,
    inputs and parameters are changed at random by as much as the precision rounds them. A stable algorithm is no worse
    than a few times the effect of that.
    """

    def check(subject: AttentionSubject) -> Line:
        notes, refused = [], []
        for side in sides(subject)[2:]:
            place = f"N={side * side}"
            with at(place), advice(precision):
                try:
                    run = run_at(subject, precision, side, torch.clone)
                except UserError as error:
                    refused.append(f"not {place}: {message(error)}")
                    continue
                wrong, said = _judged(run, precision)
            if wrong:
                return failed(f"{wrong} at {place}" + ("" if precision.dtype == torch.float32 else f"; {HALF}"))
            notes.append(f"{said} at {place}")
        note = f"{'; '.join([*refused, *notes])}; goal {precision.goal:.0e}"
        return not_supported(note) if refused else passed(note)

    return check


def _judged(run: Run, precision: Precision) -> tuple[str, str]:
    """Says what is too far from float64 ("" if nothing is), and what the largest errors are."""
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
    # A wrong output takes its gradients with it.
    outside = "output" if not errors["output"] <= limits["output"] else ""
    worst = outside or max(errors, key=lambda name: sortable(errors[name] / limits[name]))
    said += f" (rounding alone moves {worst} by {rounding[worst]:.1e})"
    if errors[worst] <= limits[worst]:
        return "", said
    return f"{worst} differs from float64 by {errors[worst]:.1e}, at most {limits[worst]:.0e}", said


def _rounding_errors(run: Run, exact: dict[str, Tensor], precision: Precision) -> dict[str, float]:
    """Returns the relative error of each result that no algorithm can avoid, as found in float64.

    It is the most of three: what rounding the inputs changes; the least number of the result's dtype; and float32's
    rounding of the output, under which a gradient that should cancel to 0 disappears.
    """
    noise = torch.finfo(torch.float32).eps * float(exact["output"].abs().max())
    found = {
        name: max(noise, _resolution(run.results[name].dtype)) / max(float(tensor.abs().max()), TINY)
        for name, tensor in exact.items()
    }
    for seed in range(DRAWS):
        generator = torch.Generator().manual_seed(seed)

        def rounded(x: Tensor, generator: torch.Generator = generator) -> Tensor:
            noise = 2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1
            return x * (1 + torch.finfo(precision.dtype).eps * noise)

        for name, tensor in exact_results(run, rounded).items():
            found[name] = max(found[name], relative_error(tensor, exact[name]))
    return found


def _resolution(dtype: torch.dtype) -> float:
    """Returns the least positive number of a dtype."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps
