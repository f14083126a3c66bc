"""Settings beside the final score, in TensorBoard's table."""

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from linvit.callbacks import FinalScore
from tests.training import batches, tiny_task, trainer


@pytest.mark.parametrize("decay", [None, 0.5])
def test_the_settings_stand_beside_the_last_score(tmp_path, decay):
    board = TensorBoardLogger(tmp_path, default_hp_metric=False)
    runner = trainer(tmp_path, max_epochs=2, logger=board, callbacks=[FinalScore()])
    runner.fit(tiny_task(lr=2e-3, ema_decay=decay), batches(16), batches(16))
    log = EventAccumulator(board.log_dir).Reload()
    content = log.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["lr"].number_value == 2e-3
    assert (settings["total_batch"].number_value, settings["peak_lr"].number_value) == (8, 2e-3)
    assert settings["backbone/name"].string_value == "deit_tiny"
    names = ["score"] if decay is None else ["score", "ema_score"]
    assert [tag for tag in log.Tags()["scalars"] if tag.startswith("final/")] == [f"final/{name}" for name in names]
    for name in names:
        assert [event.step for event in log.Scalars(f"val/{name}")] == [1, 3]  # its curve is left alone
        assert log.Scalars(f"final/{name}")[0].value == log.Scalars(f"val/{name}")[-1].value


def test_without_validation_there_is_none(tmp_path):
    board = TensorBoardLogger(tmp_path, default_hp_metric=False)
    runner = trainer(tmp_path, max_epochs=1, logger=board, callbacks=[FinalScore()])
    runner.fit(tiny_task(), batches(16))
    assert "_hparams_/session_start_info" not in EventAccumulator(board.log_dir).Reload().summary_metadata
