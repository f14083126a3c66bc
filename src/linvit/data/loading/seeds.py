"""Randomness as a function: what happens to a sample follows from (seed, epoch, index) and from nothing else.

No global generator is read or seeded, so the number of workers, the order of loading and whatever else draws numbers
change nothing.
"""

from typing import NamedTuple

import numpy as np


class Draw(NamedTuple):
    """One use of one sample, as a sampler hands it to a data set.

    Attributes:
        row: Of the data set.
        key: 63 random bits, different for every (seed, epoch, index, repeat); the source of its augmentation.
    """

    row: int
    key: int


def key(*parts: int) -> int:
    """63 bits that look independent for different parts, of which there must always be equally many."""
    state = np.random.SeedSequence(parts).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def keys(indices: np.ndarray, *parts: int) -> np.ndarray:
    """`key` for many indices at once, int64 (n,): two rounds of SplitMix64 (Steele et al. 2014) from one base."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(indices.astype(np.uint64) + np.uint64(key(*parts))))
    return (mixed >> np.uint64(1)).astype(np.int64)


def generator(key: int) -> np.random.Generator:
    """Numbers for one sample on the CPU."""
    return np.random.Generator(np.random.PCG64(key))


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 on uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
