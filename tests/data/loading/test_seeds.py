"""Seeds and numbers as functions of their parts."""

import numpy as np

from linvit.data.loading.sampler import generator, sample_seeds


def test_many_seeds_differ_and_follow_from_seed_and_epoch():
    rows = np.arange(200_000)
    first = sample_seeds(rows, 3, 0)
    assert first.dtype == np.int64
    assert first.min() >= 0
    assert np.array_equal(first, sample_seeds(rows, 3, 0))
    assert np.array_equal(first[::-1], sample_seeds(rows[::-1], 3, 0))  # whatever the order
    together = np.concatenate([first, sample_seeds(rows, 3, 1), sample_seeds(rows, 4, 0)])
    assert len(np.unique(together)) == len(together)


def test_bits_of_neighbouring_seeds_look_independent():
    """Each bit is set in half of the seeds and flips in half of the steps: 5 standard deviations of 63 x 2 counts."""
    count = 100_000
    bits = sample_seeds(np.arange(count), 0, 0)[:, None] >> np.arange(63) & 1
    flips = bits[1:] ^ bits[:-1]
    for found in (bits.mean(0), flips.mean(0)):
        assert np.abs(found - 0.5).max() < 5 * 0.5 / np.sqrt(count)


def test_generators_of_one_seed_agree_and_leave_the_global_one_alone():
    before = np.random.get_state()[1].copy()
    assert generator(5).random() == generator(5).random() != generator(6).random()
    assert np.array_equal(before, np.random.get_state()[1])
