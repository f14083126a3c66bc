"""Only one process saves to a folder."""

import os
import shutil
import signal
import time
from types import SimpleNamespace

import pytest

import linvit
from linvit.io.files import lock, make_folder, sweep, unlock
from linvit.runs.trainer import SaveRunConfig


def hold(folder, ready):
    """Locks a folder and waits to be killed, as a child of its own does, like a loader process."""
    os.setpgid(0, 0)
    lock(folder)
    if os.fork() == 0:
        os.write(ready, b"held")
    time.sleep(60)
    os._exit(0)


def test_another_process_is_refused_until_the_first_is_dead(tmp_path):
    read, write = os.pipe()
    holder = os.fork()
    if holder == 0:
        hold(tmp_path, write)
    try:
        assert os.read(read, 4) == b"held"
        with pytest.raises(linvit.UserError, match="another process saves its checkpoints to"):
            lock(tmp_path)
        os.kill(holder, signal.SIGKILL)  # its child lives on
        os.waitpid(holder, 0)
        lock(tmp_path)
    finally:
        os.killpg(holder, signal.SIGKILL)
        unlock(tmp_path)
        os.close(read)
        os.close(write)


def test_the_same_process_may_ask_again(tmp_path):
    for _ in range(2):
        lock(tmp_path / "new")
    for _ in range(2):
        unlock(tmp_path / "new")


def test_what_is_unfinished_is_swept(tmp_path):
    (tmp_path / ".last.ckpt.77.tmp").touch()
    (tmp_path / ".best.ckpt.78.tmp").touch()
    (tmp_path / "last.ckpt").touch()
    (tmp_path / "mine.tmp").touch()
    assert len(sweep(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "mine.tmp"]


def test_nothing_is_made_in_the_place_of_a_run_that_was_renamed(tmp_path):
    run, elsewhere = tmp_path / "version_0", tmp_path / "elsewhere"
    lock(run / "checkpoints")
    try:
        make_folder(run / "attention_maps")
        run.rename(elsewhere)
        for folder in (run, run / "attention_maps", run / "checkpoints"):
            with pytest.raises(FileNotFoundError, match="the folder of the run was renamed or deleted"):
                make_folder(folder)
        assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]
        make_folder(tmp_path / "other")
        elsewhere.rename(run)
        make_folder(run / "more")
    finally:
        unlock(run / "checkpoints")


def test_a_new_run_may_take_the_place_of_one_that_failed_and_was_deleted(tmp_path):
    """In one process, as in a notebook: the lock of a run that an error has ended is kept."""
    run = tmp_path / "version_0"
    lock(run / "checkpoints")
    try:
        shutil.rmtree(run)
        trainer = SimpleNamespace(log_dir=run, is_global_zero=True, checkpoint_callbacks=[])
        SaveRunConfig("seed_everything: 1", "config.yaml").setup(trainer, None, "fit")
        assert (run / "config.yaml").is_file()
        lock(run / "checkpoints")
        make_folder(run / "attention_maps")
    finally:
        unlock(run / "checkpoints")
