"""Runs that end at any operation on a file and continue by `--resume=auto` leave the files of one that did not end."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cli.forked import Ranks
from tests.cli.runs import QUICKSTART, flags, tiny
from tests.resuming import differences, files

pytestmark = pytest.mark.slow

WRITES = {"os.rename", "os.link", "os.remove", "os.mkdir", "os.truncate"}
SHORT = flags(trainer__limit_train_batches=4, trainer__limit_val_batches=2, trainer__max_epochs=3, data__batch_size=4)
DENSE = [*SHORT, *flags(trainer__accelerator="cpu", trainer__log_every_n_steps=1, trainer__accumulate_grad_batches=2)]
PLAIN = [f"--config={QUICKSTART}", *tiny(trainer__limit_train_batches=6, trainer__max_epochs=3, model__ema_decay=0.5)]
RUNS = {
    "plain": PLAIN,
    "steps": [*PLAIN, "--trainer.max_epochs=-1", "--trainer.max_steps=14"],
    "interval": [
        *PLAIN,
        "--trainer.val_check_interval=0.3",
        "--model.attention=performer",
        "--model.grad_checkpointing=true",
    ],
    "segmentation": ["--config=segmentation_quickstart", *DENSE, "--data.num_workers=2"],
    "detection": ["--config=detection_quickstart", *DENSE, "--data.num_workers=2"],
}


def before(ends_at, signals, pace=0.0):
    """What a process does first: it counts its operations on the files of a run, and ends at one of them.

    Args:
        ends_at: Number of the operation.
        signals: What it then sends itself, a second and a bit between two.
        pace: Seconds.
    """

    def hook(event, arguments):
        nonlocal ends_at
        if event not in WRITES and not (event == "open" and _writes(arguments)):
            return
        if "version_" in os.fsdecode(arguments[0]):
            ends_at -= 1
            if ends_at == 0:
                for number in signals:
                    os.kill(os.getpid(), number)
                    time.sleep(pace)

    return lambda rank: sys.addaudithook(hook)


def _writes(arguments):
    path, _, how = arguments
    return isinstance(path, str | bytes | os.PathLike) and bool(how & (os.O_WRONLY | os.O_RDWR))


def fit(folder, options, ends_at=0, signals=(), pace=0.0):
    """A part of a run; its exit code."""
    folder.mkdir(exist_ok=True)
    process = Ranks(["fit", *options, "--resume=auto"], folder, before=before(ends_at, signals, pace))
    (code,) = process.wait(300)
    return code, process.text()


def folder_of(root):
    """Of the only run."""
    (folder,) = (root / "checkpoints").glob("*/version_*")
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            root = tmp_path_factory.mktemp("whole") / "run"
            code, text = fit(root, RUNS[name])
            assert code == 0, text
            made[name] = files(folder_of(root))
        return made[name]

    return make


def check(root, name, whole):
    """The run continues to its end, and is then finished."""
    code, text = fit(root, RUNS[name])
    assert code == 0, text
    found = files(folder_of(root))
    assert differences(found, whole) == []
    code, text = fit(root, RUNS[name])
    assert (code, "is finished already" in text) == (0, True), text


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", RUNS)
def test_kills(tmp_path, whole, name, seed):
    draw = random.Random(f"{name} {seed}")
    for _ in range(2):
        code, text = fit(tmp_path / "run", RUNS[name], draw.randrange(20, 250), [signal.SIGKILL])
        assert code in (0, -signal.SIGKILL), text
    check(tmp_path / "run", name, whole(name))


@pytest.mark.parametrize("signals", [[signal.SIGINT] * 2, [signal.SIGTERM, signal.SIGKILL]], ids=["twice", "impatient"])
def test_signals(tmp_path, whole, signals):
    for ends_at in (90, 60):
        code, text = fit(tmp_path / "run", RUNS["plain"], ends_at, signals, pace=1.2)
        assert code in (130, 143, -signal.SIGKILL), text
    check(tmp_path / "run", "plain", whole("plain"))


def test_a_run_that_is_stopped_and_continued(tmp_path, whole):
    """As a debugger or a scheduler does; and killed while it is stopped."""
    root = tmp_path / "run"
    root.mkdir()
    for ends in (signal.SIGKILL, signal.SIGCONT):
        process = Ranks(["fit", *RUNS["plain"], "--resume=auto"], root, before=before(80, [signal.SIGSTOP]))
        end = time.monotonic() + 120
        while "T (stopped)" not in _state(process.started[0].pid) and time.monotonic() < end:
            time.sleep(0.05)
        process.send(ends, [0])
        (code,) = process.wait(300)
        assert code == (0 if ends == signal.SIGCONT else -signal.SIGKILL), process.text()
    check(root, "plain", whole("plain"))


def _state(pid):
    return Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
