"""Learning rates have the names and values that Lightning's monitor gives them."""

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
    own = {name: values for name, values in memory.values.items() if name.startswith("lr-")}
    assert own.keys() == monitor.lrs.keys() == {"lr-AdamW/pg1", "lr-AdamW/pg2"}
    for name, values in own.items():
        assert [step for step, _ in values] == [2, 5][: 2 // accumulate]
        assert [rate for _, rate in values] == monitor.lrs[name][accumulate - 1 :: accumulate]
