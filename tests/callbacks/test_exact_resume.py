"""A run that is interrupted anywhere and resumed is the run that was not."""

import random

import numpy as np
import pytest
import torch

import linvit
from linvit.callbacks.random_state import random_state, set_random_state
from tests.resuming import differences, run

# 7 batches per epoch; validation after the third and sixth with val_check_interval 3
CASES = {
    "map-style, before validation in the epoch": ({}, [3], {"val_check_interval": 3}),
    "stream, at the end of an epoch": ({"streaming": True, "shuffle_buffer": 99}, [7], {"check_val_every_n_epoch": 2}),
    "accumulation, twice": ({}, [1, 3], {"accumulate_grad_batches": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_interrupted_runs_are_bit_equal(case, tmp_path):
    loading, steps, options = CASES[case]
    expected = run(tmp_path / "whole", [], loading, **options)
    found = run(tmp_path / "parts", steps, loading, **options)
    assert differences(found, expected) == []


def test_the_state_of_every_generator_comes_back():
    def draw():
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random()

    draw()  # numpy and Python now hold a normal number for the next call
    cpu = torch.device("cpu")
    state = {
        name: torch.stack([torch.zeros_like(part), part])[1] for name, part in random_state(cpu).items()
    }  # rank 1's
    first, _ = draw(), draw()
    set_random_state(state, cpu)
    assert draw() == first


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
    state = random_state(torch.device("cpu"))
    with pytest.raises(linvit.UserError, match="random generators in the checkpoint cannot be used"):
        set_random_state(state | damage, torch.device("cpu"))
    set_random_state(state, torch.device("cpu"))
