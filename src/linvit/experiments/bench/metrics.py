"""The costs that are compared, each with its unit."""

from collections.abc import Callable
from typing import NamedTuple

from linvit.experiments.bench.costs import Cost
from linvit.experiments.measure import Timing

MIB = 2**20


class Metric(NamedTuple):
    """One of the costs.

    Attributes:
        key: Its name in files.
        title: Its name.
        short: Its name as the head of a narrow column.
        unit: Its unit.
        value: The cost in that unit; None if it was not measured.
        timing: The seconds behind it; None if it is no time, or was not measured.
    """

    key: str
    title: str
    short: str
    unit: str
    value: Callable[[Cost], float | None]
    timing: Callable[[Cost], Timing | None] = lambda cost: None

    def spread(self, cost: Cost) -> tuple[float, float] | None:
        """Its quartiles."""
        timing = self.timing(cost)
        return None if timing is None else (timing.quartiles[0] * 1e3, timing.quartiles[1] * 1e3)

    def ratio(self, over: Cost, under: Cost) -> float | None:
        """One cost over another; times are compared round by round."""
        times = self.timing(over), self.timing(under)
        if times[0] is not None and times[1] is not None:
            return times[0].over(times[1])
        values = self.value(over), self.value(under)
        return values[0] / values[1] if values[0] is not None and values[1] else None


def _time(key: str, title: str, short: str) -> Metric:
    def median(cost: Cost) -> float | None:
        return cost.seconds[key].median * 1e3 if key in cost.seconds else None

    names = f"{key}_time", f"time of a {title}", f"{short} time"
    return Metric(*names, "ms", median, lambda cost: cost.seconds.get(key))


def _peak(key: str, title: str, short: str) -> Metric:
    def peak(cost: Cost) -> float | None:
        return cost.peak[key] / MIB if key in cost.peak else None

    return Metric(f"{key}_peak", f"peak memory of a {title}", f"{short} peak", "MiB", peak)


def _kept(cost: Cost) -> float | None:
    return None if cost.kept is None else cost.kept / MIB


METRICS = (
    _time("forward", "forward pass", "fwd"),
    _time("forward_backward", "forward and a backward pass", "fwd+bwd"),
    _time("training_step", "training step", "step"),
    _peak("forward", "forward pass", "fwd"),
    _peak("forward_backward", "forward and a backward pass", "fwd+bwd"),
    _peak("training_step", "training step", "step"),
    Metric("kept", "memory kept for backward", "kept", "MiB", _kept),
)
