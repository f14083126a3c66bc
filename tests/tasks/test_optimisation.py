"""Settings of optimiser and schedule that make no sense are refused by name before a backbone is built."""

import math

import pytest

import linvit
from tests.training import tiny_task

BEYOND = {
    "lr": [0, -1e-3],
    **{key: [-1e-3] for key in ("min_lr", "warmup_lr", "weight_decay", "warmup_epochs", "cooldown_epochs")},
    "lr_delay": [-1, 0.5],
    **{key: [0, 0.5] for key in ("lookahead", "lr_base_batch_size", "published_batch_size")},
    "layer_decay": [0, 1.5],
    "backbone_lr_scale": [0],
}


@pytest.mark.parametrize("name", BEYOND)
def test_a_number_out_of_bounds_is_refused(name, monkeypatch):
    monkeypatch.setattr("linvit.tasks.base.create_backbone", lambda *args, **options: pytest.fail("built"))
    for value in [math.nan, math.inf, "1e-3", *BEYOND[name]]:
        with pytest.raises(linvit.UserError, match=f"^{name} must be a (whole )?number .*; got {value!r}$"):
            tiny_task(**{name: value})


@pytest.mark.parametrize("betas", [0.9, [0.9], [0.9, 0.99, 0.999], [0.9, 1.0], [-0.1, 0.9], ["0.9", 0.9]], ids=str)
def test_betas_are_two_numbers_in_bounds(betas):
    with pytest.raises(linvit.UserError, match=r"^betas must be "):
        tiny_task(betas=betas)


@pytest.mark.parametrize("name", ["lr_interval", "lr_scaling"])
def test_an_unknown_choice_is_refused(name):
    with pytest.raises(linvit.UserError, match=f"^{name} must be one of .*; got 'day'"):
        tiny_task(**{name: "day"})
