"""What is kept to go on from."""

import errno
import os
import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

import linvit
from linvit import files
from linvit.callbacks import BestCheckpoint, LastCheckpoint
from linvit.callbacks import last_checkpoint as module
from linvit.callbacks.checkpoint_io import AtomicCheckpointIO
from tests.training import Memory, fit, tiny_task


class SavesAt(Callback):
    """Saves in the middle of an epoch, as a signal or a guard does."""

    def __init__(self, last, step):
        self.last, self.step = last, step
        self.kept = None

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step and self.last.save(trainer):
            self.kept = torch.load(self.last.best_model_path, weights_only=True)


def run(folder, *callbacks, **options):
    return fit(tiny_task(), folder, callbacks=[*callbacks], enable_checkpointing=True, **options)


def test_it_is_written_after_every_epoch(tmp_path):
    run(tmp_path, LastCheckpoint(), max_epochs=3)
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 6


def test_it_is_written_whenever_somebody_asks(tmp_path):
    last = LastCheckpoint()
    asks = SavesAt(last, step=3)
    run(tmp_path, last, asks, max_epochs=2)
    assert last.best_model_path == str(tmp_path / "checkpoints" / "last.ckpt")
    assert asks.kept["global_step"] == 3
    assert torch.load(last.best_model_path, weights_only=True)["global_step"] == 4


class Killed(BaseException):
    """Stands for SIGKILL."""


class Rows(Memory):
    """A logger that knows what it has written."""

    def __init__(self):
        super().__init__()
        self.saved = 0

    def save(self):
        self.saved = len(self.values.get("train/loss", ()))


def test_it_is_the_record_of_its_moment(tmp_path, monkeypatch):
    """Rows, then last.ckpt, then its names as the best; a kill in between is made good from it."""
    best = BestCheckpoint(monitor="train/loss", mode="max", filename="{epoch}")
    best.check_monitor_top_k = lambda *_: True
    logger, folder = Rows(), tmp_path / "memory" / "version_0" / "checkpoints"
    moments = []

    def link(path, other):
        moments.append((path.name, other.name, logger.saved))
        if other.name == "epoch=1.ckpt":
            raise Killed
        files.link(path, other)

    monkeypatch.setattr(module, "link", link)
    with pytest.raises(Killed):
        run(tmp_path, best, LastCheckpoint(), max_epochs=3, logger=logger)
    assert moments == [("last.ckpt", "epoch=0.ckpt", 2), ("last.ckpt", "epoch=1.ckpt", 4)]
    content = torch.load(folder / "last.ckpt", weights_only=True)
    assert content["callbacks"][best.state_key]["best_model_path"] == str(folder / "epoch=1.ckpt")
    monkeypatch.undo()
    module.complete(folder / "last.ckpt", content["same_files"], content["replaced_files"])
    assert sorted(path.name for path in folder.glob("*.ckpt")) == ["epoch=1.ckpt", "last.ckpt", "previous.ckpt"]
    assert (folder / "epoch=1.ckpt").samefile(folder / "last.ckpt")


def test_what_a_file_says_of_others_reaches_no_other_folder(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / "a.ckpt").mkdir(parents=True)
    for path in (tmp_path / "mine.ckpt", folder / "last.ckpt", folder / "notes.txt"):
        path.touch()
    before = sorted(tmp_path.rglob("*"))
    for names in (["../mine.ckpt", str(tmp_path / "mine.ckpt"), "notes.txt", "a.ckpt", "last.ckpt", 7, None], "x", {}):
        module.complete(folder / "last.ckpt", names, names)
    assert sorted(path for path in tmp_path.rglob("*") if path.name != ".lock") == before


def test_fast_dev_run_leaves_nothing(tmp_path):
    last = LastCheckpoint()
    run(tmp_path, last, fast_dev_run=True)
    last.save(run(tmp_path, last, fast_dev_run=True))
    assert not list(tmp_path.rglob("*.ckpt"))


def test_its_state_is_found_in_checkpoints_of_lightning_s_class():
    assert LastCheckpoint().state_key == ModelCheckpoint(filename="last").state_key


class Disk:
    """Counts the checkpoints that are written, and refuses some of them."""

    def __init__(self, monkeypatch, *refused):
        self.count, self.refused, self.save = 0, refused, AtomicCheckpointIO.save_checkpoint
        monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", lambda *args, **_: self(*args))

    def __call__(self, plugin, checkpoint, path):
        self.count += 1
        if self.count in self.refused:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self.save(plugin, checkpoint, path)


def step_of(path):
    return torch.load(path, weights_only=True)["global_step"]


def test_the_run_goes_on_if_it_cannot_save(tmp_path, monkeypatch):
    Disk(monkeypatch, 2)
    last = LastCheckpoint()
    with pytest.warns(UserWarning, match=r"step 4: checkpoint .*last\.ckpt' could not be saved: No space left"):
        trainer = run(tmp_path, last, max_epochs=3)
    assert trainer.global_step == 6
    assert last.failure is None
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == 6
    assert step_of(tmp_path / "checkpoints" / "previous.ckpt") == 2


def test_it_tries_again_at_the_end(tmp_path, monkeypatch):
    disk, last = Disk(monkeypatch, 3), LastCheckpoint()
    with pytest.warns(UserWarning, match="could not be saved"):
        run(tmp_path, last, max_epochs=3)
    assert (disk.count, last.failure) == (4, None)
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == 6


def test_what_failed_to_the_end_is_known(tmp_path, monkeypatch):
    Disk(monkeypatch, 3, 4)
    last = LastCheckpoint()
    with pytest.warns(UserWarning, match="could not be saved"):
        run(tmp_path, last, max_epochs=3)
    assert re.fullmatch(r"checkpoint '.*last.ckpt' could not be saved: No space left on device", last.failure)
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == 4


def test_it_tries_again_within_the_epoch(tmp_path, monkeypatch):
    disk, last = Disk(monkeypatch, 1), LastCheckpoint()
    monkeypatch.setattr(module, "RETRY", 0.0)
    with pytest.warns(UserWarning, match="could not be saved"):
        run(tmp_path, last, SavesAt(last, step=1), max_epochs=1, limit_train_batches=2)
    assert (disk.count, last.failure) == (3, None)
    assert step_of(tmp_path / "checkpoints" / "previous.ckpt") == 1  # before the epoch's own


def test_a_best_that_cannot_be_saved_is_not_the_best(tmp_path, monkeypatch):
    Disk(monkeypatch, 2)
    best = BestCheckpoint(tmp_path, monitor="train/loss", mode="max", filename="best", save_on_train_epoch_end=True)
    scores = iter([0.5, 0.9, 0.7])
    task = tiny_task()
    task.on_train_epoch_end = lambda: task.log("train/loss", next(scores))
    with pytest.warns(UserWarning, match="could not be saved"):
        fit(task, tmp_path, callbacks=[best], enable_checkpointing=True, max_epochs=3)
    assert best.best_model_score == pytest.approx(0.7)
    assert step_of(tmp_path / "best.ckpt") == 6
    assert best.failure is None


def test_a_disk_without_room_for_two_is_refused_at_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=100_000))
    with pytest.raises(linvit.UserError, match=r"has 100 kB left, and a checkpoint of this model takes about \d+ kB"):
        run(tmp_path, LastCheckpoint())


def test_what_a_killed_run_left_unfinished_is_gone(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".last.ckpt.77.tmp").write_bytes(bytes(100))
    run(tmp_path, LastCheckpoint())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [".lock", "last.ckpt"]
