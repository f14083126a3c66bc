"""The costs that are compared, each with its unit."""

from collections.abc import Callable
from typing import NamedTuple

from linvit.experiments.bench.costs import Cost

MIB = 2**20


class Metric(NamedTuple):
    """One of the costs.

    Attributes:
        key: Its name in files.
        title: Its name.
        short: Its name as the head of a narrow column.
        unit: Its unit.
        value: The cost in that unit; None if it was not measured.
        spread: Its quartiles.
    """

    key: str
    title: str
    short: str
    unit: str
    value: Callable[[Cost], float | None]
    spread: Callable[[Cost], tuple[float, float] | None] = lambda cost: None


def _time(key: str, title: str, short: str) -> Metric:
    def median(cost: Cost) -> float | None:
        return cost.seconds[key].median * 1e3 if key in cost.seconds else None

    def quartiles(cost: Cost) -> tuple[float, float] | None:
        if key not in cost.seconds:
            return None
        low, high = cost.seconds[key].quartiles
        return low * 1e3, high * 1e3

    return Metric(f"{key}_time", f"time of a {title}", f"{short} time", "ms", median, quartiles)


def _peak(key: str, title: str, short: str) -> Metric:
    def peak(cost: Cost) -> float | None:
        return cost.peak[key] / MIB if key in cost.peak else None

    return Metric(f"{key}_peak", f"peak memory of a {title}", f"{short} peak", "MiB", peak)


def _kept(cost: Cost) -> float | None:
    return None if cost.kept is None else cost.kept / MIB


METRICS = (
    _time("forward", "forward pass", "forward"),
    _time("forward_backward", "forward and a backward pass", "fwd+bwd"),
    _peak("forward", "forward pass", "forward"),
    _peak("forward_backward", "forward and a backward pass", "fwd+bwd"),
    Metric("kept", "memory kept for backward", "kept", "MiB", _kept),
)
