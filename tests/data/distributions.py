"""Whether numbers come from one distribution, at a significance of 0.001; with fixed seeds that is so for ever."""

import math
from collections.abc import Callable, Sequence

import numpy as np

SIGNIFICANCE = 1e-3
NORMAL_QUANTILE = 3.0902  # of 1 - SIGNIFICANCE


def alike(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Kolmogorov's and Smirnov's test of two samples, by its asymptotic bound; conservative where values tie."""
    first, second = np.sort(ours), np.sort(theirs)
    values = np.concatenate([first, second])
    shares = [np.searchsorted(one, values, side="right") / len(one) for one in (first, second)]
    return bool(np.abs(shares[0] - shares[1]).max() <= _bound() * math.sqrt(1 / len(first) + 1 / len(second)))


def follows(numbers: Sequence[float], cdf: Callable[[np.ndarray], np.ndarray]) -> bool:
    """Kolmogorov's test of one sample against a distribution function."""
    ordered = np.sort(numbers)
    count = len(ordered)
    steps, ideal = np.arange(count + 1) / count, cdf(ordered)
    distance = max((steps[1:] - ideal).max(), (ideal - steps[:-1]).max())
    return bool(distance <= _bound() / math.sqrt(count))


def uniform(low: float, high: float) -> Callable[[np.ndarray], np.ndarray]:
    """The distribution function of even numbers between two."""
    return lambda x: np.clip((x - low) / (high - low), 0, 1)


def independent(table: Sequence[Sequence[int]]) -> bool:
    """The chi-squared test that rows and columns of counts say nothing about each other."""
    counts = np.asarray(table, float)
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    return _small(counts, expected, (counts.shape[0] - 1) * (counts.shape[1] - 1))


def even(counts: Sequence[int]) -> bool:
    """The chi-squared test that all are equally likely."""
    found = np.asarray(counts, float)
    return _small(found, np.full_like(found, found.mean()), len(found) - 1)


def _small(counts: np.ndarray, expected: np.ndarray, freedom: int) -> bool:
    """Chi-squared below its quantile, by Wilson and Hilferty's approximation."""
    bound = freedom * (1 - 2 / (9 * freedom) + NORMAL_QUANTILE * math.sqrt(2 / (9 * freedom))) ** 3
    return bool(((counts - expected) ** 2 / expected).sum() <= bound)


def _bound() -> float:
    return math.sqrt(-math.log(SIGNIFICANCE / 2) / 2)
