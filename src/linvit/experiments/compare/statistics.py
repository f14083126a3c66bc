"""Statistics of scores over seeds and over images: paired differences from a baseline, corrected for their number."""

import functools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import mpmath  # type: ignore[import-untyped]
import numpy as np

LEVEL = 0.95
LEAST = 3  # seeds, for a star: of two, the t-test has no power, and its assumption cannot be seen
SAMPLES = 10_000
ROUNDING = 1e-6  # relative to the scores, which are logged in float32


class Difference(NamedTuple):
    """A mean difference over seeds, with the paired t-test of one comparison among several."""

    mean: float
    low: float  # end of its 95 % confidence interval; NaN for fewer than two pairs, or equal differences
    high: float
    pairs: int
    p: float  # of so large a mean if there were no difference, for this comparison alone; NaN as above
    p_holm: float = math.nan  # by Holm's step-down correction for all comparisons of a table; NaN if it is not tested

    @property
    def significant(self) -> bool:
        """True if the difference is significant at 5 % after Holm's correction."""
        return self.p_holm < 1 - LEVEL


def wilson(share: float, images: int) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a share of images (Wilson 1927), which has a width even at 0 and 1."""
    z = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
    middle = (share + z * z / (2 * images)) / (1 + z * z / images)
    half = z / (1 + z * z / images) * math.sqrt(share * (1 - share) / images + (z / (2 * images)) ** 2)
    return middle - half, middle + half


def bootstrap(values: np.ndarray) -> tuple[float, float]:
    """Returns the 95 % confidence interval of the mean of one value per image (N,), by 10,000 samples of the images."""
    kinds, counts = np.unique(values.round(9), return_counts=True)
    drawn = np.random.default_rng(0).multinomial(len(values), counts / len(values), SAMPLES) @ kinds / len(values)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]).tolist()
    return low, high


def spread(scores: Sequence[float]) -> float:
    """Returns the standard deviation of a sample; NaN for a single one."""
    return statistics.stdev(scores) if len(scores) > 1 else math.nan


def paired_differences(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[Difference]:
    """Differences of several variants from their baselines, by scores of the same seeds; three or more are tested."""
    found = [_alone(ours, baseline) for ours, baseline in pairs]
    family = [number for number, one in enumerate(found) if one.pairs >= LEAST]
    tested = sorted((number for number in family if found[number].p == found[number].p), key=lambda n: found[n].p)
    least = 0.0
    for rank, number in enumerate(tested):
        one = found[number]
        least = max(least, min(1.0, (len(family) - rank) * one.p))  # no smaller than that of a smaller p
        found[number] = one._replace(p_holm=least)
    return found


def _alone(ours: Sequence[float], baseline: Sequence[float]) -> Difference:
    differences = [one - other for one, other in zip(ours, baseline, strict=True)]
    mean, pairs = statistics.fmean(differences) if differences else math.nan, len(differences)
    deviation = spread(differences)
    if not deviation > ROUNDING * max(map(abs, [*ours, *baseline]), default=0.0):
        return Difference(mean, math.nan, math.nan, pairs, math.nan)
    error = deviation / math.sqrt(pairs)
    half = t_quantile(pairs - 1) * error
    return Difference(mean, mean - half, mean + half, pairs, t_test(mean / error, pairs - 1))


def t_test(t: float, freedom: int) -> float:
    """Returns the probability with which Student's distribution exceeds t in absolute value."""
    return float(mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


@functools.cache
def t_quantile(freedom: int) -> float:
    """Returns the t that Student's distribution exceeds in absolute value with a probability of 5 %."""
    return float(mpmath.findroot(lambda t: t_test(float(t), freedom) - (1 - LEVEL), (1.9, 13), solver="anderson"))
