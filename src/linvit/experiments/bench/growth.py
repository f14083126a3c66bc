"""How a cost grows with the size of the input: growth exponents, and from which size one is below another."""

import math
from collections.abc import Mapping
from statistics import linear_regression


def growth_exponent(costs: Mapping[float, float]) -> float | None:
    """Fits `cost = a * size^b` by least squares of the logarithms, to the upper half of the sizes on a log axis.

    What a call costs at any size flattens the curve at its lower end, which is therefore left out, unless there
    are but two sizes.

    Args:
        costs: The cost at each size; those that are not positive or not finite are left out.

    Returns:
        b; None if the upper half of more than two sizes has but one, or there is but one size.
    """
    known = {math.log(size): math.log(cost) for size, cost in costs.items() if 0 < cost < math.inf}
    middle = (min(known) + max(known)) / 2 - 1e-9 if len(known) > 2 else -math.inf
    upper = {x: y for x, y in known.items() if x >= middle}
    return linear_regression([*upper], [*upper.values()]).slope if len(upper) > 1 else None


def crossover(costs: Mapping[float, float], baseline: Mapping[float, float]) -> float | None:
    """From which size on a cost stays at or below that of a baseline, up to the largest size that was measured.

    Between the last size at which it is above and the next one, the ratio of the two is taken for a straight line on
    log axes, and the size at which that line passes 1 is returned. A cost of infinity stands for what could not run.

    Args:
        costs: The cost at each size.
        baseline: That of the baseline.

    Returns:
        The size: 0 where it is so at all sizes, infinity where it never is; None if no size has both.
    """
    both = costs.keys() & baseline.keys()
    sizes = sorted(size for size in both if 0 < min(costs[size], baseline[size]) < math.inf)
    above = [k for k, size in enumerate(sizes) if costs[size] > baseline[size]]
    if not above:
        return 0.0 if sizes else None
    if above[-1] == len(sizes) - 1:
        return math.inf
    low, high = sizes[above[-1]], sizes[above[-1] + 1]
    if math.inf in (costs[low], baseline[high]):
        return high
    before, after = (math.log(costs[size] / baseline[size]) for size in (low, high))
    return float(low * (high / low) ** (before / (before - after)))


def crossover_text(size: float | None) -> str:
    """A crossover as tables have it: "1,432", "always", "never", or "-" if it is not known."""
    return "-" if size is None else {0.0: "always", math.inf: "never"}.get(size, f"{size:,.0f}")
