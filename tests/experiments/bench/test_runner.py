"""A module that is ready to run."""

import copy
import importlib.util
import math

import pytest
import torch

import linvit
from linvit.attention.kernels import choice
from linvit.experiments.bench import builders
from linvit.experiments.bench.costs import Cost
from linvit.experiments.bench.runner import Runner, Settings
from linvit.experiments.measure import Timing
from linvit.registry import attention_kernels
from linvit.registry.entries import Entry
from tests.attention import kernel_cases as formulas


def test_training_steps_run_backward_and_change_no_weight():
    model = linvit.create_backbone("deit_nano", img_size=32)
    before = copy.deepcopy(model.state_dict())
    runner = Runner(model, (torch.randn(2, 3, 32, 32),), {}, Settings(optimizer=True))
    runner.training_step()
    moments = runner.optimizer.state[model.head.weight]["exp_avg"]
    assert moments.abs().sum() > 0
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_what_no_kernel_computes_is_not_measured_as_one(monkeypatch):
    monkeypatch.setattr(choice, "INTERPRETED", True)  # as if there were a GPU
    settings = Settings(modes=("eager", "triton"))
    built = builders.mechanism({"name": "linear", "normalize": False}, 16, 2, settings, (4, 4))
    with pytest.raises(linvit.UserError, match="no kernel computes this"):
        Runner(*built, settings, "triton")


def test_a_kernel_with_gradients_that_are_not_numbers_is_not_measured(monkeypatch):
    def broken(q, k, v, formula):
        q = q.clone()
        q.register_hook(lambda gradient: gradient * math.nan)
        return 1.0001 * formulas.plain(q, k, v, formula)

    monkeypatch.setitem(choice._loaded, "broken", broken)
    monkeypatch.setitem(attention_kernels._registered, "broken", Entry("broken", "tests:broken", "tests"))
    settings = Settings(modes=("eager", "broken"))
    with pytest.raises(linvit.UserError, match="differ from torch's by nan"):
        Runner(*builders.mechanism("linear", 16, 2, settings, (4, 4)), settings, "broken")


def test_kernels_are_compared_at_the_least_favourable_size():
    seconds = {("eager", 14): 4.0, ("triton", 14): 1.0, ("eager", 28): 3.0, ("triton", 28): 2.0}
    costs = [
        Cost("linear", (side, side), mode, seconds={"forward_backward": Timing((time,))})
        for (mode, side), time in seconds.items()
    ]
    said = builders.kernel_ratios(costs, ["linear"], Settings("cuda", modes=("eager", "triton")))
    assert said == "torch / triton, at the least favourable size: linear 1.50"
