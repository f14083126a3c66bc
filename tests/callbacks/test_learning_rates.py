"""Learning rates have names of their own and the values that Lightning's monitor logs."""

import pytest
from lightning.pytorch.callbacks import LearningRateMonitor

from linvit.callbacks import LearningRates
from tests.training import Memory, fit, tiny_task


@pytest.mark.parametrize("accumulate", [1, 2])
def test_they_are_those_of_the_steps_that_are_logged(tmp_path, accumulate):
    memory, monitor = Memory(), LearningRateMonitor("step")
    options = {"accumulate_grad_batches": accumulate, "log_every_n_steps": 3, "logger": memory}
    fit(tiny_task(), tmp_path, 64, callbacks=[LearningRates()], **options)
    fit(tiny_task(), tmp_path, 64, callbacks=[monitor], **{**options, "logger": Memory()})
    own = {name: values for name, values in memory.values.items() if name.startswith("lr")}
    assert own.keys() == {"lr"}  # weights with and without decay have the same
    assert [step for step, _ in own["lr"]] == [2, 5][: 2 // accumulate]
    for rates in monitor.lrs.values():
        assert [rate for _, rate in own["lr"]] == rates[accumulate - 1 :: accumulate]


def test_groups_with_rates_of_their_own_are_named_by_the_factor(tmp_path):
    memory = Memory()
    fit(tiny_task(backbone_lr_scale=0.1), tmp_path, logger=memory, callbacks=[LearningRates()])
    own = {name for name in memory.values if name.startswith("lr")}
    assert own == {"lr", "lr/x0.1"}
