"""How a cost grows with the size of the input: growth exponents, and from which size one is below another."""

import math
from collections.abc import Mapping
from typing import NamedTuple


class Exponent(NamedTuple):
    """The slope of a cost over the size, both on log axes: 1 is linear growth, 2 quadratic.

    Attributes:
        value: The slope.
        first: The smallest size that the fit uses.
        last: The largest one.
    """

    value: float
    first: float
    last: float


class Crossover(NamedTuple):
    """From which size on a cost is at most another.

    Attributes:
        size: The size, interpolated where the two change places between two measured sizes; None if they never do.
        first: The smallest size at which both are known.
        last: The largest one.
    """

    size: float | None
    first: float
    last: float

    def __str__(self) -> str:
        """Such as "1,432", "always from 196 on", or "never up to 12,544"."""
        if self.size is None:
            return f"never up to {self.last:,.0f}"
        return f"always from {self.first:,.0f} on" if self.size <= self.first else f"{self.size:,.0f}"

    @property
    def brief(self) -> str:
        """The size, "always" where it is so at all sizes, or "never"."""
        return str(self).partition(" ")[0]


def growth_exponent(costs: Mapping[float, float]) -> Exponent | None:
    """Fits `cost = a * size^b` by least squares of the logarithms, to the upper half of the sizes on a log axis.

    What a call costs whatever its size flattens the curve at its lower end, which is therefore left out, unless there
    are but two sizes.

    Args:
        costs: The cost at each size; those that are not positive are left out.

    Returns:
        The exponent; None if the upper half of more than two sizes has but one, or there is but one size.
    """
    known = {math.log(size): math.log(cost) for size, cost in costs.items() if cost > 0}
    if not known:
        return None
    middle = (min(known) + max(known)) / 2 - 1e-9
    upper = {x: y for x, y in known.items() if x >= middle or len(known) == 2}
    if len(upper) < 2:
        return None
    x0, y0 = sum(upper) / len(upper), sum(upper.values()) / len(upper)
    slope = sum((x - x0) * (y - y0) for x, y in upper.items()) / sum((x - x0) ** 2 for x in upper)
    return Exponent(slope, math.exp(min(upper)), math.exp(max(upper)))


def crossover(costs: Mapping[float, float], baseline: Mapping[float, float]) -> Crossover | None:
    """From which size on a cost stays at or below that of a baseline, up to the largest size that was measured.

    Between the last size at which it is above and the next one, the ratio of the two is taken for a straight line on
    log axes, and the size at which that line passes 1 is returned. A cost of infinity stands for what could not run.

    Args:
        costs: The cost at each size.
        baseline: That of the baseline.

    Returns:
        The size; None if there is none at which both are known.
    """
    both = costs.keys() & baseline.keys()
    sizes = sorted(size for size in both if 0 < min(costs[size], baseline[size]) < math.inf)
    if not sizes:
        return None
    above = [k for k, size in enumerate(sizes) if costs[size] > baseline[size]]
    if not above:
        return Crossover(sizes[0], sizes[0], sizes[-1])
    if above[-1] == len(sizes) - 1:
        return Crossover(None, sizes[0], sizes[-1])
    low, high = sizes[above[-1]], sizes[above[-1] + 1]
    if math.inf in (costs[low], baseline[high]):
        return Crossover(high, sizes[0], sizes[-1])
    before, after = (math.log(costs[size] / baseline[size]) for size in (low, high))
    return Crossover(low * (high / low) ** (before / (before - after)), sizes[0], sizes[-1])
