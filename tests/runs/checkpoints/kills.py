"""Kills a run that saves all the time, and resumes it: `python -m tests.runs.checkpoints.kills`.

Half of the kills are at a random moment, half within a write. After each one the run must go on by itself, from a step
that is not before the last one that was known to be saved, and leave no temporary file. The temporary folder of the
system is on another file system, as on a cluster. Most runs are forked from this process, so that they start in a
second; some are real commands.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from linvit.callbacks.save_checkpoints import AtomicCheckpointIO
from linvit.errors import UserError
from linvit.io.files import TEMPORARY
from linvit.runs.checkpoint import whole_checkpoints
from linvit.weights import torch_file
from tests.cli.forked import Ranks
from tests.cli.runs import QUICKSTART, tiny

SECONDS = 4.0  # in which a run that is killed at random dies
COMMAND = [
    "fit",
    f"--config={QUICKSTART}",
    *tiny(model__backbone="{name: deit_nano, depth: 1, embed_dim: 384}", trainer__max_epochs=10_000),
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--data.batch_size=2",
    "--trainer.num_sanity_val_steps=0",
    "--resume=auto",
]


class Kills:
    """Runs, kills and counts.

    Args:
        root: Where the runs are.
        shm: Folder on another file system, which is their temporary folder.
        plain: Whether Lightning's own plug-in writes, to show that the kills find what is wrong with it.
    """

    def __init__(self, root: Path, shm: Path, plain: bool = False) -> None:
        self.root, self.shm, self.plain = root, shm, plain
        self.run = root / "checkpoints" / "quickstart" / "version_0"
        self.folder = self.run / "checkpoints"
        self.known = 0  # the last step that was known to be saved
        self.within, self.broken, self.lost, self.left, self.went_back = 0, 0, 0, 0, 0

    def kill(self, aimed: bool, real: bool, draw: random.Random) -> None:
        """One kill, and the start after it."""
        process = self._start([], real)
        if aimed:
            self._wait_for_a_write(draw, process)
        else:
            time.sleep(draw.uniform(0, SECONDS))
        self.within += self._is_writing()
        process.kill()
        process.wait()
        self.broken += sum(not is_whole(path) for path in self.folder.glob("*.ckpt"))
        newest = next(whole_checkpoints(self.run), None)
        step = 0 if newest is None else newest.step
        self.went_back += step < self.known
        process = self._start([f"--trainer.max_steps={step + 2}"], real)
        code = process.wait()
        newest = next(whole_checkpoints(self.run), None)
        self.known = 0 if newest is None or code else newest.step
        if self.known != step + 2 or (step and "continues from" not in process.text()):
            self.lost += 1
            print(process.text(), flush=True)
            shutil.rmtree(self.run, ignore_errors=True)
            self.known = 0
        self.left += len(list(self.folder.glob(f".*{TEMPORARY}"))) + len(list(self.shm.iterdir()))
        for path in self.shm.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _start(self, more: list[str], real: bool) -> "Process":
        return Process([*COMMAND, *more], self.root, self.shm, real, self._before)

    def _before(self, rank: int = 0) -> None:
        tempfile.tempdir = None  # which this process has found before TMPDIR was set
        if self.plain:
            AtomicCheckpointIO.save_checkpoint = TorchCheckpointIO.save_checkpoint  # type: ignore[method-assign]

    def _is_writing(self) -> bool:
        """Whether a file is being written; Lightning's plug-in writes to the temporary folder and copies it."""
        return any(self.folder.glob(f".*{TEMPORARY}")) or any(self.shm.iterdir())

    def _wait_for_a_write(self, draw: random.Random, process: "Process") -> None:
        for _ in range(draw.randint(1, 4)):
            while not self._is_writing() and process.poll() is None:
                pass
            time.sleep(draw.uniform(0, 0.15) * draw.random())


def is_whole(path: Path) -> bool:
    """Whether a checkpoint can be opened."""
    try:
        torch_file.load(path)
    except UserError:
        return False
    return True


class Process:
    """A run: forked from this process, or a real command."""

    def __init__(self, command: list[str], root: Path, shm: Path, real: bool, before: Callable[[int], None]) -> None:
        env = {"TMPDIR": str(shm), "OMP_NUM_THREADS": "1"}
        if real:
            self.output = root / f"output-{time.monotonic_ns()}"
            with self.output.open("wb") as file:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "linvit", *command],
                    cwd=root,
                    env={**os.environ, **env},
                    stdout=file,
                    stderr=file,
                )
        else:
            ranks = Ranks(command, root, env=env, before=before)
            self.output, self.process = ranks.output, ranks.started[0]
        self.poll, self.kill = self.process.poll, self.process.kill

    def wait(self) -> int:
        """The exit code."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return int(code)

    def text(self) -> str:
        """What it printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def main(arguments: list[str] | None = None) -> int:
    """Prints the counts; 0 if nothing was lost or left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--real", type=int, default=10, help="of these, how many of real commands")
    parser.add_argument("--shm", default="/dev/shm", help="another file system than the current folder's")
    parser.add_argument("--plain", action="store_true", help="with Lightning's own plug-in, for comparison")
    given = parser.parse_args(arguments)
    draw = random.Random(0)
    torch.set_num_threads(1)
    # a process that is forked from this one deletes every TemporaryDirectory when it ends
    root, shm = Path(tempfile.mkdtemp(dir=".")).absolute(), Path(tempfile.mkdtemp(dir=given.shm))
    assert root.stat().st_dev != shm.stat().st_dev, "the same file system"
    kills = Kills(root, shm, given.plain)
    try:
        for number in range(given.kills):
            real = given.real > 0 and number % (given.kills // given.real) == 0
            kills.kill(aimed=number % 4 < 2, real=real, draw=draw)
            print(
                f"{number + 1} kills, {kills.within} within a write: {kills.broken} files broken, {kills.lost} runs "
                f"lost, {kills.went_back} gone back, {kills.left} temporary files left",
                flush=True,
            )
    finally:
        shutil.rmtree(root)
        shutil.rmtree(shm)
    return int(kills.broken + kills.lost + kills.left + kills.went_back > 0)


if __name__ == "__main__":
    raise SystemExit(main())
