"""The generators of every rank, saved in one tensor, are restored."""

import random

import numpy as np
import pytest
import torch

import linvit
from linvit.callbacks.random_state import random_state, set_random_state

CPU = torch.device("cpu")


def draw():
    """A number from each generator."""
    return torch.rand(()).item(), np.random.randn(), random.random(), random.gauss(0, 1)


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


@pytest.mark.parametrize(
    "damage",
    [
        {"torch": torch.zeros(5056, dtype=torch.uint8)},
        {"torch": torch.zeros(3)},
        {"numpy": torch.full((627,), 1e6, dtype=torch.float64)},
        {"python": torch.full((627,), float("nan"), dtype=torch.float64)},
        {"numpy": torch.zeros(2)},
    ],
    ids=str,
)
def test_a_state_that_is_none_is_refused(damage):
    state = random_state(CPU)
    with pytest.raises(linvit.UserError, match="random generators in the checkpoint cannot be used"):
        set_random_state(state | damage, CPU)
    set_random_state(state, CPU)
