"""Paired differences and their intervals."""

import math

import pytest

from linvit.experiments.compare.statistics import paired_difference, spread, t_quantile


@pytest.mark.parametrize(  # of printed tables, 0.975
    ("freedom", "t"), [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227)]
)
def test_quantiles_are_those_of_tables(freedom, t):
    assert t_quantile(freedom) == pytest.approx(t, rel=1e-5)


def test_an_interval_is_that_of_the_paired_t_test():
    found = paired_difference([0.75, 0.82, 0.93], [0.70, 0.80, 0.90])  # differences 0.05, 0.02, 0.03
    deviation = math.sqrt((0.05 / 3) ** 2 + (-0.04 / 3) ** 2 + (-0.01 / 3) ** 2) / math.sqrt(2)
    half = 4.302653 * deviation / math.sqrt(3)
    assert found == pytest.approx((0.1 / 3, 0.1 / 3 - half, 0.1 / 3 + half, 3))
    assert not found.significant
    assert paired_difference([0.75, 0.82, 0.93], [0.5, 0.57, 0.681]).significant


def test_one_seed_has_no_interval():
    found = paired_difference([0.5], [0.25])
    assert found.mean == 0.25
    assert math.isnan(found.low)
    assert not found.significant
    assert math.isnan(spread([1.0]))
    assert math.isnan(paired_difference([], []).mean)
