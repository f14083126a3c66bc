"""A module that is ready to run."""

import copy

import torch

import linvit
from linvit.experiments.bench.runner import Runner, Settings


def test_training_steps_run_backward_and_change_no_weight():
    model = linvit.create_backbone("deit_nano", img_size=32)
    before = copy.deepcopy(model.state_dict())
    runner = Runner(model, (torch.randn(2, 3, 32, 32),), {}, Settings(optimizer=True))
    runner.training_step()
    moments = runner.optimizer.state[model.head.weight]["exp_avg"]
    assert moments.abs().sum() > 0
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
