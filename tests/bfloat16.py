"""What a GPU leaves in bfloat16, computed on a CPU."""

import contextlib
from collections.abc import Iterator

from linvit.attention.ops import decorators
from linvit.testing.attention.precision import Outcome, exact_results


@contextlib.contextmanager
def bfloat16_stays() -> Iterator[None]:
    """Lets methods under `mixed_precision` compute here as on a GPU."""
    before = set(decorators.BFLOAT16_DEVICES)
    decorators.BFLOAT16_DEVICES.add("cpu")
    try:
        yield
    finally:
        decorators.BFLOAT16_DEVICES.intersection_update(before)


def root_mean_square(run: Outcome) -> tuple[float, float]:
    """Relative errors of the output and of the worst gradient, in the norm of all entries."""
    exact = exact_results(run)
    errors = {name: float((x.double() - exact[name]).norm() / exact[name].norm()) for name, x in run.results.items()}
    return errors.pop("output"), max(errors.values(), default=0.0)
