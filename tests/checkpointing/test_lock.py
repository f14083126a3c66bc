"""Only one process saves to a folder."""

import os
import signal
import subprocess
import sys

import pytest

import linvit
from linvit.checkpointing.atomic_file import sweep
from linvit.checkpointing.lock import lock, unlock

HOLDER = """
import os, sys, time
from pathlib import Path
from linvit.checkpointing.lock import lock
lock(Path(sys.argv[1]))
if os.fork() == 0:  # as a loader process
    print("held", flush=True)
    time.sleep(60)
time.sleep(60)
"""


def test_another_process_is_refused_until_the_first_is_dead(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True,
                              start_new_session=True)  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(linvit.UserError, match="another process saves its checkpoints to"):
            lock(tmp_path)
        holder.kill()  # its child lives on
        holder.wait()
        lock(tmp_path)
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.stdout.close()
        unlock(tmp_path)


def test_the_same_process_may_ask_again(tmp_path):
    for _ in range(2):
        lock(tmp_path / "new")
    for _ in range(2):
        unlock(tmp_path / "new")


def test_what_is_unfinished_is_swept(tmp_path):
    (tmp_path / ".last.ckpt.77.tmp").touch()
    (tmp_path / ".best.ckpt.78.tmp").mkdir()
    (tmp_path / ".best.ckpt.78.tmp" / "__0_0.distcp").touch()
    (tmp_path / "last.ckpt").touch()
    (tmp_path / "mine.tmp").touch()
    assert len(sweep(tmp_path)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "mine.tmp"]
