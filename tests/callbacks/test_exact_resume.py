"""A run that is interrupted anywhere and resumed is the run that was not."""

import pytest

from tests.resuming import differences, run

# 7 batches per epoch; validation after the third and sixth with val_check_interval 3
CASES = {
    "map-style, before validation in the epoch": ({"num_workers": 0}, [3], {"val_check_interval": 3}),
    "stream, at the end of an epoch": ({"streaming": True, "shuffle_buffer": 99}, [7], {"check_val_every_n_epoch": 2}),
    "accumulation, twice": ({}, [1, 3], {"accumulate_grad_batches": 4}),
    "steps, several validations in the epoch": (
        {},
        [9],
        {"max_epochs": -1, "max_steps": 12, "val_check_interval": 0.3},
    ),
}


SLOW = list(CASES)[1:]


@pytest.mark.parametrize("case", [next(iter(CASES)), *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_interrupted_runs_are_bit_equal(case, tmp_path):
    loading, steps, options = CASES[case]
    expected = run(tmp_path / "whole", [], loading, **options)
    found = run(tmp_path / "parts", steps, loading, **options)
    assert differences(found, expected) == []
