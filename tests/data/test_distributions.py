"""The tests of distributions tell what differs from what does not."""

import numpy as np
import pytest

from tests.data.distributions import alike, even, follows, independent, uniform

COUNT, TRIES = 2000, 300


def rejected(test, make):
    """Share of tries in which a test says no."""
    return np.mean([not test(*make(np.random.default_rng(seed))) for seed in range(TRIES)])


CASES = [
    (alike, lambda rng, off: (rng.normal(size=COUNT), rng.normal(size=COUNT) * (1 + off) + off)),
    (follows, lambda rng, off: (rng.uniform(0, 1 + off, COUNT), uniform(0, 1))),
    (even, lambda rng, off: (np.bincount(rng.choice(4, COUNT, p=[0.25 - off / 2, 0.25 + off / 2, 0.25, 0.25])),)),
    (
        independent,
        lambda rng, off: (
            np.histogram2d(x := rng.normal(size=COUNT), off * 2 * x + rng.normal(size=COUNT), [[-9, -1, 0, 1, 9]] * 2)[
                0
            ],
        ),
    ),
]


@pytest.mark.parametrize(("test", "make"), CASES, ids=lambda case: getattr(case, "__name__", ""))
def test_alike_passes_and_different_fails(test, make):
    assert rejected(test, lambda rng: make(rng, 0)) <= 0.01  # 0.001 expected
    assert rejected(test, lambda rng: make(rng, 0.15)) >= 0.9
