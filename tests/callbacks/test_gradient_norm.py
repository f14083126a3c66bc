"""The gradient's length, against the one computed by hand, before clipping."""

import pytest
import torch
from lightning.pytorch import Callback

from linvit.callbacks import GradientNorm
from tests.training import Memory, fit, tiny_task


class ByHand(Callback):
    """The norm that the optimiser would see without clipping."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, task, optimizer):
        gradient = torch.cat([weight.grad.flatten() for weight in task.network.parameters()])
        self.norms.append(gradient.double().norm().item())


def test_it_is_the_norm_before_clipping(tmp_path):
    memory, hand = Memory(), ByHand()
    options = {"gradient_clip_val": 1e-3, "accumulate_grad_batches": 2, "logger": memory}
    fit(tiny_task(), tmp_path, 64, callbacks=[GradientNorm(), hand], **options)
    assert [value for _, value in memory.values["grad_norm"]] == pytest.approx(hand.norms, rel=1e-5)
    assert [step for step, _ in memory.values["grad_norm"]] == list(range(4))
    assert min(hand.norms) > 1e-2


def test_only_steps_that_are_logged_are_measured(tmp_path, monkeypatch):
    memory, measured = Memory(), []
    monkeypatch.setattr("linvit.callbacks.monitors.get_total_norm", lambda grads: measured.append(1) or 1.0)
    fit(tiny_task(), tmp_path, 64, callbacks=[GradientNorm()], logger=memory, log_every_n_steps=3)
    assert [step for step, _ in memory.values["grad_norm"]][:2] == [2, 5]
    assert len(measured) == 2
