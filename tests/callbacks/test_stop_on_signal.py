"""A run that a signal stops saves its state at that step, says how to go on, and goes on as if nothing had been."""

import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from linvit.callbacks.stop_on_signal import StopOnSignal
from linvit.io.signals import STOP, Stopped
from tests.cli.forked import Ranks
from tests.cli.runs import QUICKSTART, Run, events, linvit, tiny
from tests.tasks.two_ranks import Odd
from tests.training import tiny_task

EPOCH = 10  # steps
PATIENCE = 60  # seconds


class Send(Callback):
    """Sends this process a signal in a hook, at a step, and waits until it is noticed."""

    def __init__(self, signal: str, hook: str, step: int):
        self.signal, self.step = signal, step
        setattr(self, hook, self.send)

    def send(self, trainer, *args, **kwargs):
        if trainer.global_step != self.step or trainer.sanity_checking:
            return
        signal.raise_signal(getattr(signal, self.signal))
        until = time.monotonic() + PATIENCE
        while STOP.received is None:
            assert time.monotonic() < until, f"{self.signal} was not noticed"
            time.sleep(0.001)
        self.step = None


def stopped(root, by, hook, step, *arguments, verb="fit"):
    """The tiny quickstart, which gets a signal."""
    callback = [
        f"--trainer.callbacks+={__name__}.Send",
        *(f"--trainer.callbacks.{name}={value}" for name, value in [("signal", by), ("hook", hook), ("step", step)]),
    ]
    return linvit(verb, f"--config={QUICKSTART}", *tiny(), *callback, *arguments, cwd=root)


def go_on(root):
    """Goes on with the run."""
    run = Run(root, None)
    done = linvit("fit", f"--config={QUICKSTART}", *tiny(), "--resume=auto", cwd=root)
    assert done.code == 0, done.err
    return events(run.folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The curves of a run that was not stopped."""
    root = tmp_path_factory.mktemp("whole")
    assert linvit("fit", f"--config={QUICKSTART}", *tiny(), cwd=root).code == 0
    return events(Run(root, None).folder)


@pytest.mark.parametrize(
    ("by", "hook", "step", "saved"),
    [
        ("SIGINT", "on_train_batch_start", 13, 14),
        ("SIGUSR1", "on_train_batch_end", EPOCH, EPOCH),  # validation is next
    ],
)
def test_it_saves_and_goes_on(tmp_path, whole, by, hook, step, saved):
    if not hasattr(signal, by):
        pytest.skip(f"this system has no {by}")
    done = stopped(tmp_path, by, hook, step)
    assert done.code == (130 if by == "SIGINT" else 143), done.err
    assert f"ended by {'Ctrl-C' if by == 'SIGINT' else by} at step {saved}\n" in done.log
    run = Run(tmp_path, done)
    assert torch.load(run.checkpoint("last"), weights_only=True)["global_step"] == saved
    if saved == EPOCH:  # its validation was cut short, or not begun
        assert "val/score" not in events(run.folder)
        assert not run.checkpoint("best").exists()
    curves = go_on(tmp_path)
    assert curves["train/loss"] == whole["train/loss"]
    assert curves["val/score"] == whole["val/score"]


def test_under_slurm_the_exit_code_is_the_one_that_requeues(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert stopped(tmp_path, "SIGTERM", "on_train_batch_end", 1, "--requeue_exit_code=85").code == 85


def test_without_training_the_process_ends_at_once(tmp_path, monkeypatch):
    exits = []
    monkeypatch.setattr(STOP, "exit_now", lambda code, message: exits.append((code, message)))
    stopped(tmp_path, "SIGTERM", "on_validation_start", 0, "--untrained", verb="validate")
    assert exits == [(143, "ended by SIGTERM")]


def test_ranks_stop_within_the_batches_that_all_of_them_have(monkeypatch):
    """A rank may have a batch more to validate than another: in it nobody would answer."""
    callback = StopOnSignal()
    asked = []
    callback._group = object()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda least, *_: asked.append("MIN") or least.fill_(2))
    monkeypatch.setattr(callback, "_save_if_asked", lambda trainer: asked.append("stop"))
    monkeypatch.setattr(STOP, "deferred", True)
    trainer = SimpleNamespace(num_val_batches=[3])
    callback.on_validation_start(trainer, None)
    for batch in range(3):
        callback.on_validation_batch_end(trainer, None, None, None, batch)
    assert asked == ["MIN", "stop", "stop"]


def test_ranks_read_what_they_exchanged_one_step_later(monkeypatch):
    """So that no rank waits for a slower one, and all stop at the same step."""
    asked = []

    def all_reduce(tensor, *_, async_op):
        asked.append(tensor)
        return SimpleNamespace(wait=lambda tensor=tensor: tensor.fill_(max(tensor, other)))

    callback, other = StopOnSignal(), 0
    callback._group = object()
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(STOP, "received", None)
    monkeypatch.setattr(STOP, "agreed", False)
    assert [callback._asked(), callback._asked()] == [0, 0]
    STOP.received = signal.SIGTERM
    assert callback._asked() == 0
    assert callback._asked() == signal.SIGTERM
    STOP.received, other = None, signal.SIGINT
    assert callback._asked() == signal.SIGTERM
    assert callback._asked() == signal.SIGINT


def validate_unevenly(rank, batch):
    """Trains and validates; a rank gets a signal in a batch of validation. Rank 0 has three of them, rank 1 two."""

    class SendInBatch(Callback):
        def on_validation_batch_start(self, trainer, *args):
            if trainer.global_rank == rank and args[2] == batch and STOP.received is None:
                signal.raise_signal(signal.SIGTERM)
                while STOP.received is None:
                    time.sleep(0.001)

    with STOP.caught():
        task = tiny_task(backbone={"name": "timm", "model": "resnet10t"}, img_size=32)
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 2}
        options["num_sanity_val_steps"] = 0
        callbacks = [SendInBatch(), StopOnSignal()]
        runner = Trainer(accelerator="cpu", devices=2, strategy="ddp", callbacks=callbacks, **options)
        try:
            runner.fit(task, datamodule=Odd())
        except Stopped:
            Path(f"stopped-{runner.global_rank}").write_text(str(runner.global_step), encoding="utf-8")
    return 0


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "batch", "step"), [(0, 0, 2), (0, 1, 3), (1, 1, 3), (0, 2, 4)])
def test_ranks_with_unequal_numbers_of_batches_stop_together(tmp_path, rank, batch, step):
    run = Ranks([], tmp_path, 2, call=lambda: validate_unevenly(rank, batch))
    assert run.wait() == [0, 0], run.text()
    assert [(tmp_path / f"stopped-{rank}").read_text(encoding="utf-8") for rank in (0, 1)] == [str(step)] * 2
