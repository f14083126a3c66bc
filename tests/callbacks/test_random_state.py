"""The generators of every rank, saved in one tensor, are restored."""

import random

import numpy as np
import torch

from linvit.callbacks.random_state import random_state, set_random_state

CPU = torch.device("cpu")


def draw():
    """A number from each generator."""
    return torch.rand(()).item(), np.random.rand(), random.random(), random.gauss(0, 1)


def test_each_rank_goes_on_with_its_own():
    before, states, expected = random_state(CPU), [], []
    try:
        for seed in range(2):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            states.append(random_state(CPU))
            expected.append(draw())
        together = {name: torch.stack([state[name] for state in states]) for name in before}  # (ranks, n)
        for rank in (1, 0):
            set_random_state({name: part[rank] for name, part in together.items()}, CPU)
            assert draw() == expected[rank]
    finally:
        set_random_state(before, CPU)
