"""Disks that are full and folders that are read-only: a small file system, and files that nobody may change."""

import subprocess
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from linvit.weights import torch_file
from tests.cli.runs import QUICKSTART, flags, linvit, tiny

pytestmark = pytest.mark.slow
RUN = Path("runs/quickstart/version_0")


class At(Callback):
    """Does something to the run's folder after an epoch, from the shell."""

    def __init__(self, epoch: int, command: str) -> None:
        self.epoch, self.command = epoch, command

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            subprocess.run(self.command, shell=True, cwd=trainer.log_dir, check=False)


def fit(disk, *commands, **options):
    """Four epochs of two steps; `commands` are what the shell does at the start of epochs: (epoch, command)."""
    callbacks = []
    for epoch, command in commands:
        callbacks += [f"--trainer.callbacks+={__name__}.At", f"--trainer.callbacks.epoch={epoch}"]
        callbacks += [f"--trainer.callbacks.command={command}"]
    short = flags(trainer__limit_train_batches=2, trainer__limit_val_batches=1, trainer__max_epochs=4)
    where = flags(trainer__default_root_dir="runs", **options)
    return linvit("fit", f"--config={QUICKSTART}", *tiny(), *short, *where, *callbacks, cwd=disk)


def step_of(path):
    torch_file.check_archive(path)
    return torch.load(path, weights_only=True)["global_step"]


def says_in_one_line(done, reason):
    (line,) = (line for line in done.err.splitlines() if line.startswith("linvit: error: the run has ended"))
    assert f"could not be saved: {reason}" in line
    assert "Traceback" not in done.err


@pytest.fixture
def disk(tmp_path):
    """A file system of 12 MB, which seven checkpoints fill."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", folder], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def lockable(tmp_path):
    """A folder in which `chattr +i` works: then even root changes nothing."""
    if subprocess.run(["chattr", "+i", tmp_path], check=False, capture_output=True).returncode:
        pytest.skip("chattr does not work here")
    subprocess.run(["chattr", "-i", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["chattr", "-R", "-i", tmp_path], check=True)


FILL = "head -c 100M /dev/zero > fill; head -c 1M /dev/zero > fill2"


def test_a_disk_that_fills_up(disk):
    """Until there is room for a part of a checkpoint."""
    done = fit(disk, (2, f"{FILL}; truncate -s -1000000 fill"))
    assert done.code == 2
    says_in_one_line(done, "No space left on device")
    kept = disk / RUN / "checkpoints"
    assert step_of(kept / "last.ckpt") == 4
    assert not list(kept.glob(".*.tmp"))
    (disk / RUN / "fill").unlink()
    done = fit(disk, **{"resume": "auto"})
    assert done.code == 0, done.err
    assert step_of(kept / "last.ckpt") == 8


def test_a_folder_that_is_read_only_at_the_start(lockable):
    (lockable / "runs").mkdir()
    subprocess.run(["chattr", "+i", lockable / "runs"], check=True)
    done = fit(lockable)
    assert done.code == 2
    assert "runs': Operation not permitted. Choose another one with --trainer.default" in done.err
