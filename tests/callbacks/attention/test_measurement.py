"""What callbacks that look at attention share."""

from types import SimpleNamespace

import pytest
from torch import nn

from linvit.callbacks import AttentionMaps, AttentionRank


class Run(SimpleNamespace):
    """A trainer; its `log_dir` is a broadcast from rank 0, which waits for ever if another rank does not ask."""

    asked = 0

    @property
    def log_dir(self):
        self.asked += 1
        return None


@pytest.mark.parametrize("callback", [AttentionMaps, AttentionRank])
def test_all_ranks_ask_for_the_folder_and_none_asks_alone_later(callback):
    ranks = [Run(is_global_zero=rank == 0, strategy=None, global_step=0) for rank in range(2)]
    for run in ranks:
        task = nn.Module()
        measurement = callback(every_n_steps=1)
        measurement.on_train_start(run, task)
        measurement.on_train_batch_start(run, task, None, 0)
    assert [run.asked for run in ranks] == [1, 1]
