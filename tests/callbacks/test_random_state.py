"""The state of the random generators."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import linvit
from linvit.callbacks.exact_resume import ExactResume, random_state, set_random_state

CPU = torch.device("cpu")


def draw():
    """A number from each generator."""
    return torch.rand(()).item(), np.random.randn(), random.random(), random.gauss(0, 1)


def test_what_is_drawn_is_drawn_again(tmp_path):
    before, states, expected = random_state(CPU), [], []
    try:
        for seed in range(2):
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            states.append(random_state(CPU))
            expected.append(draw())
        torch.save(states, tmp_path / "states.pt")
        states = torch.load(tmp_path / "states.pt", weights_only=True)
        for rank in (1, 0):
            set_random_state(states[rank], CPU)
            assert draw() == expected[rank]
    finally:
        set_random_state(before, CPU)


@pytest.mark.parametrize(
    "damage",
    [
        {"torch": torch.zeros(5056, dtype=torch.uint8)},
        {"numpy": {"bit_generator": "MT19937", "state": {"key": [0] * 624, "pos": 10**6}}},
        {"python": (3, (0,) * 3, None)},
    ],
    ids=str,
)
def test_a_state_that_is_none_is_refused(damage):
    state = random_state(CPU)
    with pytest.raises(linvit.UserError, match="states of random generators in the checkpoint cannot be used"):
        set_random_state(state | damage, CPU)
    set_random_state(state, CPU)


@pytest.mark.parametrize(("saved", "ranks"), [(0, 3), (1, 3), (3, 2), (3, 3)], ids=str)
def test_no_two_ranks_draw_the_same(saved, ranks):
    before, states, drawn = random_state(CPU), [], []
    try:
        for seed in range(saved):
            torch.manual_seed(seed)
            states.append(random_state(CPU))
        for rank in range(ranks):
            torch.manual_seed(0)
            loop = SimpleNamespace(restarted_mid_epoch=False, epoch_loop=SimpleNamespace())
            callback = ExactResume()
            callback._generators = states or None
            callback.on_train_start(SimpleNamespace(global_rank=rank, fit_loop=loop), SimpleNamespace(device=CPU))
            drawn.append(torch.rand(()).item())
        torch.manual_seed(0)
        assert drawn[0] == torch.rand(()).item()
        assert len({*drawn}) == ranks
    finally:
        set_random_state(before, CPU)
