"""What a run says last."""

import pytest

from linvit.callbacks import SaveCheckpoints
from linvit.callbacks.save_checkpoints import Best
from linvit.runs.endings import run_summary


@pytest.mark.parametrize(("weights", "name"), [("raw", "best.ckpt"), ("ema", "best_ema.ckpt")])
def test_the_checkpoint_to_test_is_the_one_that_predicts(tmp_path, weights, name):
    saves = SaveCheckpoints()
    saves.dirpath = str(tmp_path / "checkpoints")
    assert run_summary(saves, weights, tmp_path, ["max_epochs=MORE"]) == ""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/last.ckpt").touch()
    (line,) = run_summary(saves, weights, tmp_path, ["max_epochs=MORE"]).splitlines()[1:]  # nothing was scored
    assert line.endswith(f"linvit fit --config {tmp_path}/config.yaml --resume=auto --trainer.max_epochs=MORE")
    saves.best[0].value = 0.5
    saves.best.append(Best("val/ema_score", "max", "best_ema.ckpt", 0.625))
    lines = run_summary(saves, weights, tmp_path, ["max_epochs"]).splitlines()
    assert not [line for line in lines if "best" in line]  # their files were deleted
    for best in saves.best:
        (tmp_path / "checkpoints" / best.name).touch()
    lines = run_summary(saves, weights, tmp_path, ["max_epochs"]).splitlines()
    assert "  best val/ema_score  0.6250" in lines
    (command,) = (line for line in lines if "linvit test" in line)
    assert command.endswith(f"--ckpt_path {tmp_path}/checkpoints/{name}")
