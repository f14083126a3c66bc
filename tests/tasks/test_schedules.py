"""Learning-rate schedules by themselves."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from linvit.tasks.schedules import CosineCycles, WarmupCosine, WarmupPoly, WarmupSteps
from tests.golden_files import load

PEAK, START, END = 1e-3, 1e-6, 1e-5


def schedule(warmup=20, total=300, steps_per_epoch=10, **options):
    return WarmupCosine(PEAK, START, END, warmup, total, steps_per_epoch, **options)


@pytest.mark.parametrize(
    ("epoch", "rate"),
    [
        (0, START),
        (10, START + (PEAK - START) / 2),
        (20, END + (PEAK - END) * 0.98907380),  # (1 + cos(pi 20/300)) / 2: the cosine is not shifted by the warm-up
        (150, (PEAK + END) / 2),
        (300, END),
        (1000, END),
    ],
)
def test_rate_at_chosen_epochs(epoch, rate):
    assert schedule().at(epoch) == pytest.approx(rate, rel=1e-6)
    assert schedule()(10 * epoch) == schedule().at(epoch)


def test_a_cosine_may_begin_where_the_warm_up_ends():
    rates = schedule(shifted=True)
    assert [rates.at(epoch) for epoch in (10, 20, 160, 300)] == pytest.approx(
        [START + (PEAK - START) / 2, PEAK, (PEAK + END) / 2, END]
    )


@pytest.mark.parametrize(("lag", "steps_per_epoch"), [(0, 1251), (1, 3)])
def test_per_epoch_the_rate_is_one_for_all_steps_of_an_epoch(steps_per_epoch, lag):
    rates = schedule(steps_per_epoch=steps_per_epoch, interval="epoch", delay=lag)
    for epoch in (0, 1, 2, 19, 20, 21, 299, 300):
        for step in {epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch - 1}:
            assert rates(step) == schedule().at(max(epoch - lag, 0))


@pytest.mark.parametrize("name", ["sem_fpn_pvt", "upernet_swin"])
def test_the_polynomial_decay_equals_mmcv_s(name):
    golden, steps_per_epoch = load("dense_schedules"), 1263
    official = golden.constructor[name]
    base, steps, warmup = official["base"], official["max_iters"], official.get("warmup_iters", 0)
    schedule = WarmupPoly(
        peak=base,
        start=base * official.get("warmup_ratio", 1),
        end=0,
        warmup=warmup / steps_per_epoch,
        total=steps / steps_per_epoch,
        steps_per_epoch=steps_per_epoch,
        power=official["power"],
    )
    rates = [schedule(step) for step in golden.tensors[f"input.iter_{name}"].tolist()]
    golden.check(f"output.{name}", 1e6 * torch.tensor(rates, dtype=torch.float64))


@pytest.mark.parametrize("name", ["det_1x", "det_3x"])
def test_falling_in_steps_equals_mmcv_s(name):
    golden = load("dense_schedules")
    official = golden.constructor["det_1x"] | golden.constructor[name]
    base, per_epoch = official["base"], official["iters_per_epoch"]
    schedule = WarmupSteps(
        peak=base,
        start=base * official["warmup_ratio"],
        end=0,
        warmup=official["warmup_iters"] / per_epoch,
        total=official["epochs"],
        steps_per_epoch=per_epoch,
        epochs=official["step"],
        factor=official["gamma"],
    )
    rates = [schedule(step) for step in golden.tensors[f"input.iter_{name}"].tolist()]
    golden.check(f"output.{name}", 1e6 * torch.tensor(rates, dtype=torch.float64))


def test_the_polynomial_decay_ends_at_its_end_and_stays_there():
    schedule = WarmupPoly(PEAK, START, END, warmup=0, total=4, steps_per_epoch=10, power=0.9)
    assert schedule(0) == PEAK
    assert schedule(40) == schedule(50) == END
    assert schedule(20) == pytest.approx(END + (PEAK - END) * 0.5**0.9, rel=1e-12)


@pytest.mark.parametrize(
    ("official", "options"),
    [
        (partial(lr_scheduler.CosineAnnealingLR, T_max=10, eta_min=END), {"cycle": 10, "wave": True}),
        (partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=15, T_mult=2, eta_min=END), {"cycle": 15, "growth": 2}),
    ],
    ids=["wave", "restarts"],
)
def test_cycles_equal_torch_s(official, options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=PEAK)
    theirs = official(optimizer)
    ours = CosineCycles(PEAK, START, END, 0, 105, 7, interval="epoch", **options)
    for epoch in range(105):
        assert ours(7 * epoch) == ours(7 * epoch + 6) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-9)
        optimizer.step()
        theirs.step()
    assert ours(7 * 105) == END
