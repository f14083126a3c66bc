"""What runs is compared with what was asked for before training: monitors, devices, processes."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from linvit import UserError
from linvit.callbacks import SaveCheckpoints
from linvit.runs.trainer import LAUNCHERS, check_monitors, check_processes
from tests.cli.runs import QUICKSTART, flags, linvit, tiny
from tests.training import tiny_task

RUNNING = SimpleNamespace(limit_val_batches=1.0)
EARLY = "--trainer.callbacks=lightning.pytorch.callbacks.EarlyStopping"


@pytest.mark.parametrize("kind", [EarlyStopping, ModelCheckpoint, SaveCheckpoints])
@pytest.mark.parametrize(
    ("monitor", "right"),
    [
        ("val/score", "max"),
        ("val/ema_top1", "max"),
        ("val/loss", "min"),
        ("train/loss", "min"),
    ],
)
def test_a_mode_that_takes_the_worst_for_the_best_is_corrected(recwarn, kind, monitor, right):
    task, wrong = tiny_task(ema_decay=0.9), {"min": "max", "max": "min"}[right]
    good, bad = kind(monitor=monitor, mode=right), kind(monitor=monitor, mode=wrong)
    check_monitors([good], task, RUNNING)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=f"{monitor} is the better.*mode={right} takes the place of mode={wrong}"):
        check_monitors([bad], task, RUNNING)
    if kind is SaveCheckpoints:
        assert bad.best == good.best
    else:
        names = ("best_score", "min_delta", "kth_value", "mode", "monitor")
        assert [vars(bad).get(name) for name in names] == [vars(good).get(name) for name in names]


def test_a_metric_of_unknown_direction_is_left_alone(recwarn):
    check_monitors([EarlyStopping("mine"), EarlyStopping("mine", mode="max")], tiny_task(), RUNNING)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("monitor", "options", "words"),
    [
        ("val/score", {"trainer__limit_val_batches": 0}, "limit_val_batches=0 disables validation"),
        ("val/scor", {}, "`val/scor` which is not available"),
    ],
)
def test_early_stopping_that_cannot_work_is_one_sentence(tmp_path, monitor, options, words):
    options = flags(trainer__limit_train_batches=1, trainer__max_epochs=1, **options)
    callback = [EARLY, f"--trainer.callbacks.monitor={monitor}"]
    done = linvit("fit", f"--config={QUICKSTART}", *tiny(), *options, *callback, cwd=tmp_path)
    assert done.code == 2
    assert words in done.err
    assert "Traceback" not in done.err


def running(devices, nodes, world):
    return SimpleNamespace(num_devices=devices, num_nodes=nodes, world_size=world)


@pytest.mark.parametrize(("devices", "nodes", "world"), [(2, 2, 4), (1, 1, 64)])
def test_as_many_processes_as_were_asked_for(monkeypatch, devices, nodes, world):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    check_processes(running(devices, nodes, world))


def test_more_processes_than_train_together_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="ask for 1 processes, 2 are started, and 1 would train together"):
        check_processes(running(1, 1, 1))


def test_variables_of_an_interactive_cluster_shell(tmp_path, monkeypatch):
    shell = {"SLURM_JOB_NAME": "sh", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2"}
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    options = flags(trainer__devices=2, trainer__strategy="ddp")
    done = linvit("fit", f"--config={QUICKSTART}", *tiny(), *options, cwd=tmp_path)
    assert done.code == 2
    assert "env -u SLURM_NTASKS linvit" in done.err
    assert not list(tmp_path.rglob("*.ckpt"))
