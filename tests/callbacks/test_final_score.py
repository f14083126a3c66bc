"""Settings beside the final score, in TensorBoard's table."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from linvit.callbacks import FinalScore
from tests.training import batches, tiny_task, trainer


@pytest.mark.parametrize("decay", [None, 0.5])
def test_the_settings_and_the_scores_are_named(tmp_path, decay):
    board = TensorBoardLogger(tmp_path, default_hp_metric=False)
    runner = trainer(tmp_path, max_epochs=2, logger=board, callbacks=[FinalScore()])
    runner.fit(tiny_task(lr=2e-3, ema_decay=decay), batches(16), batches(16))
    log = EventAccumulator(board.log_dir).Reload()
    content = log.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["lr"].number_value == 2e-3
    assert (settings["total_batch"].number_value, settings["peak_lr"].number_value) == (8, 2e-3)
    assert settings["backbone/name"].string_value == "deit_tiny"
    content = log.summary_metadata["_hparams_/experiment"].plugin_data.content
    scores = [info.name.tag for info in HParamsPluginData.FromString(content).experiment.metric_infos]
    assert scores == ["val/score", "val/ema_score"][: 1 if decay is None else 2]
    assert all(
        [event.step for event in log.Scalars(score)] == [1, 3] for score in scores
    )  # their curves are left alone


def test_without_validation_there_is_none(tmp_path):
    board = TensorBoardLogger(tmp_path, default_hp_metric=False)
    runner = trainer(tmp_path, max_epochs=1, logger=board, callbacks=[FinalScore()])
    runner.fit(tiny_task(), batches(16))
    assert "_hparams_/session_start_info" not in EventAccumulator(board.log_dir).Reload().summary_metadata


def test_other_ranks_have_nothing_to_write():
    logger = TensorBoardLogger.__new__(TensorBoardLogger)  # whose `experiment` is a stand-in there
    runner = SimpleNamespace(loggers=[logger], is_global_zero=False, enable_validation=True)
    FinalScore().on_train_start(runner, tiny_task())
