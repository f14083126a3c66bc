"""A run that is interrupted anywhere and resumed is the run that was not."""

import random

import numpy as np
import pytest
import torch

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
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    expected, whole = run(tmp_path / "whole", [], loading, **options)
    found, parts = run(tmp_path / "parts", steps, loading, **options)
    assert differences(found, expected) == []
    assert parts.samples == whole.samples
    assert parts.events == whole.events


def test_the_state_of_every_generator_comes_back():
    def draw():
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1), random.random()

    draw()  # numpy and Python now hold a normal number for the next call
    state = random_state(torch.device("cpu"))
    first, _ = draw(), draw()
    set_random_state(state, torch.device("cpu"))
    assert draw() == first
