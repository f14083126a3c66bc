"""Paired differences, their intervals, and the correction for many of them."""

import math

import numpy as np
import pytest

from linvit.experiments.compare.statistics import bootstrap, paired_differences, spread, t_quantile, t_test, wilson


def difference(ours, baseline):
    """A single comparison."""
    return paired_differences([(ours, baseline)])[0]


@pytest.mark.parametrize(  # of printed tables, 0.975
    ("freedom", "t"), [(1, 12.7062), (2, 4.30265), (30, 2.04227)]
)
def test_quantiles_are_those_of_tables(freedom, t):
    assert t_quantile(freedom) == pytest.approx(t, rel=1e-5)
    assert t_test(-t, freedom) == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("t", [0.5, 4.0, 30.0, 300.0])
def test_probabilities_are_those_of_the_formula_for_two_degrees_of_freedom(t):
    assert t_test(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t**2), rel=1e-3)


def test_an_interval_is_that_of_the_paired_t_test():
    found = difference([0.75, 0.82, 0.93], [0.70, 0.80, 0.90])  # differences 0.05, 0.02, 0.03
    deviation = math.sqrt((0.05 / 3) ** 2 + (-0.04 / 3) ** 2 + (-0.01 / 3) ** 2) / math.sqrt(2)
    half = 4.302653 * deviation / math.sqrt(3)
    assert found[:4] == pytest.approx((0.1 / 3, 0.1 / 3 - half, 0.1 / 3 + half, 3))
    assert found.p_holm == pytest.approx(found.p)  # alone
    assert not found.significant
    assert difference([0.75, 0.82, 0.93], [0.5, 0.57, 0.681]).significant


def test_holm_multiplies_by_the_comparisons_that_are_left():
    rng = np.random.default_rng(0)
    pairs = [(list(0.5 + shift + rng.normal(0, 0.01, 4)), [0.5] * 4) for shift in (0.5, 0.03, 0.02, 0.0)]
    found = paired_differences([*pairs, ([0.6, 0.7], [0.5, 0.5])])  # two seeds are no comparison
    p = [one.p for one in found[:4]]
    assert p == sorted(p)
    wanted = [min(1, factor * value) for factor, value in zip((4, 3, 2, 1), p, strict=True)]
    assert [one.p_holm for one in found[:4]] == pytest.approx(list(np.maximum.accumulate(wanted)))


@pytest.mark.parametrize(
    ("ours", "baseline"),
    [
        ([0.5], [0.25]),
        ([0.75, 0.7501], [0.25, 0.25]),  # two seeds
        ([0.75, 0.75, 0.75], [0.25, 0.25, 0.25]),
        ([1 / 180, 2 / 180, 3 / 180], [0.0, 1 / 180, 2 / 180]),  # one image more each time
    ],
)
def test_too_few_seeds_and_equal_differences_earn_no_star(ours, baseline):
    found = difference(np.float32(ours).tolist(), np.float32(baseline).tolist())
    assert found.mean > 0
    assert not found.significant
    assert math.isnan(found.p_holm)


def test_nothing_has_no_difference():
    assert math.isnan(difference([], []).mean)
    assert math.isnan(spread([1.0]))


def test_of_29_variants_that_are_alike_few_tables_have_a_star():
    rng, tables = np.random.default_rng(0), 60
    uncorrected = corrected = 0
    for _ in range(tables):
        baseline, *others = rng.normal(0.9, 0.01, (30, 3)).tolist()
        found = paired_differences([(ours, baseline) for ours in others])
        uncorrected += any(one.low > 0 or one.high < 0 for one in found)
        corrected += any(one.significant for one in found)
    assert uncorrected / tables > 0.5
    assert corrected / tables <= 0.05


@pytest.mark.parametrize(  # of the literature: Newcombe 1998, table I
    ("right", "images", "ends"), [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611))]
)
def test_wilsons_interval(right, images, ends):
    assert wilson(right / images, images) == pytest.approx(ends, abs=5e-5)


def test_the_bootstrap_of_many_images_is_the_normal_interval_and_repeats():
    values = np.random.default_rng(1).choice([0.0, 1 / 3, 2 / 3, 1.0], 2000)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert bootstrap(values) == pytest.approx((values.mean() - half, values.mean() + half), abs=5e-4)
    assert bootstrap(values) == bootstrap(values)
