"""Exponents and crossovers of curves that are known."""

import math

import pytest

from linvit.experiments.bench.costs import crossover, growth_exponent

SIZES = (196, 392, 784, 1568, 3136)


@pytest.mark.parametrize("power", [1, 2])
def test_the_exponent_of_a_power_with_a_constant_at_the_lower_end(power):
    fit = growth_exponent({n: 1e-9 * n**power * (1 if n > 700 else 5) for n in SIZES})
    assert fit == pytest.approx(power)


def test_there_is_no_exponent_of_one_size():
    assert growth_exponent({196: 1.0}) is None
    assert growth_exponent({196: 0.0, 784: 0.0}) is None
    assert growth_exponent({}) is None


def test_the_crossover_of_a_line_with_a_parabola():
    met = crossover({n: 1000.0 * n for n in SIZES}, {n: float(n) ** 2 for n in SIZES})
    assert met.size == pytest.approx(1000)
    assert str(met) == "1,000"
    assert met.measured == tuple(SIZES)


def test_curves_that_do_not_cross():
    low, high = dict.fromkeys(SIZES, 1.0), dict.fromkeys(SIZES, 2.0)
    assert str(crossover(high, low)) == f"> {max(SIZES):,}"
    assert str(crossover(low, high)) == f"≤ {min(SIZES):,}"
    assert crossover(low, {}) is None


def test_a_curve_that_falls_below_and_rises_again_has_not_crossed():
    assert crossover({196: 2, 784: 1, 3136: 5}, {196: 1, 784: 2, 3136: 4}).size == math.inf


def test_memory_that_does_not_suffice_is_more_than_any_cost():
    baseline = {196: 1.0, 784: 16.0, 3136: math.inf}
    assert crossover({196: 20.0, 784: 80.0, 3136: 320.0}, baseline).size == 3136
    assert crossover({196: 20.0, 784: 80.0, 3136: math.inf}, {196: 1.0, 784: 16.0, 3136: 256.0}).size == math.inf
