"""Seeds of single samples: what happens to a sample follows from (seed, epoch, index) and from nothing else.

No global generator is read or seeded, so neither the number of workers nor the order of loading nor other code that
draws random numbers changes anything.
"""

from typing import NamedTuple

import numpy as np


class SeededIndex(NamedTuple):
    """One use of the sample of a row; all of its augmentation follows from the seed, 63 bits."""

    row: int
    seed: int


def sample_seed(*parts: int) -> int:
    """63 bits that look independent for different parts; callers always give the same number of parts."""
    state = np.random.SeedSequence(parts).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def sample_seeds(indices: np.ndarray, *parts: int) -> np.ndarray:
    """Seeds for many indices at once, int64 (n,): two rounds of SplitMix64 (Steele et al. 2014) from one base."""
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(indices.astype(np.uint64) + np.uint64(sample_seed(*parts))))
    return (mixed >> np.uint64(1)).astype(np.int64)


def generator(seed: int) -> np.random.Generator:
    """A random generator for one sample on the CPU."""
    return np.random.Generator(np.random.PCG64(seed))


def _splitmix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 on uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
