"""What is written is whole, and what was there before is not lost."""

import errno
import os
import resource
from pathlib import Path

import pytest
import torch

from linvit.callbacks.save_checkpoints import AtomicCheckpointIO
from linvit.io import files

PLUGIN = AtomicCheckpointIO()


def state(step):
    return {"global_step": step, "state_dict": {"w": torch.full((50_000,), float(step))}}


def saved(path):
    return torch.load(path, weights_only=True)["global_step"]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def failing_fsync(monkeypatch):
    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files.os, "fsync", fail)


def read_only(monkeypatch):
    def fail(self, mode="r", *_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", fail)


def short_write(monkeypatch):
    """A file system that says that it has everything, and has not."""

    def sync(file):
        os.truncate(file, 1000)

    monkeypatch.setattr(files.os, "fsync", sync)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (failing_fsync, "Input/output error"),
        (read_only, "Read-only file system"),
        (short_write, r"only 1000 of \d+ bytes were written"),
    ],
)
def test_what_was_there_stays_if_it_cannot_be_written(tmp_path, monkeypatch, fault, reason):
    for step in (1, 2):
        PLUGIN.save_checkpoint(state(step), tmp_path / "last.ckpt")
    with monkeypatch.context() as patch:
        fault(patch)
        with pytest.raises(OSError, match=rf"{reason}.*last\.ckpt"):
            PLUGIN.save_checkpoint(state(3), tmp_path / "last.ckpt")
    assert (names(tmp_path), saved(tmp_path / "last.ckpt")) == (["last.ckpt"], 2)


def test_a_limit_on_the_size_of_files(tmp_path):
    """The reason is that of the file, and not what torch makes of it."""
    PLUGIN.save_checkpoint(state(1), tmp_path / "x.ckpt")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            PLUGIN.save_checkpoint(state(2), tmp_path / "x.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert saved(tmp_path / "x.ckpt") == 1
    assert names(tmp_path) == ["x.ckpt"]
