"""Statistics of scores over seeds: paired differences with their confidence intervals."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95


class Difference(NamedTuple):
    """A mean difference and its 95 % confidence interval by the paired t-test over seeds, not corrected for many tests.

    Attributes:
        mean: Of the differences.
        low: Lower end of the interval; NaN for fewer than two pairs.
        high: Upper end.
        pairs: Number of pairs.
    """

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def significant(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def spread(scores: Sequence[float]) -> float:
    """Standard deviation of a sample; NaN for a single one."""
    return statistics.stdev(scores) if len(scores) > 1 else math.nan


def paired_difference(ours: Sequence[float], baseline: Sequence[float]) -> Difference:
    """The difference of scores that belong together in pairs.

    Args:
        ours: Scores, one per seed.
        baseline: Those of the same seeds in the same order.
    """
    differences = [one - other for one, other in zip(ours, baseline, strict=True)]
    mean = statistics.fmean(differences) if differences else math.nan
    if len(differences) < 2:
        return Difference(mean, math.nan, math.nan, len(differences))
    half = t_quantile(len(differences) - 1) * spread(differences) / math.sqrt(len(differences))
    return Difference(mean, mean - half, mean + half, len(differences))


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The t that Student's distribution exceeds in absolute value with probability 1 - level.

    With t = sqrt(n) tan(a) the density of n degrees of freedom is that of cos^(n-1)(a), which is integrated from 0 to
    pi/2 by Simpson's rule; of the angles the one is taken below which the share `level` lies.
    """
    angles = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    pairs = (density[:-2:2] + 4 * density[1::2] + density[2::2]).cumsum()
    share = np.concatenate([[0.0], pairs / pairs[-1]])
    return math.sqrt(freedom) * math.tan(float(np.interp(level, share, angles[::2])))
