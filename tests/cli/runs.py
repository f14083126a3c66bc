"""Runs the command line in this process, in a folder, and keeps what it says."""

import contextlib
import gc
import io
import logging
import re
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from linvit.cli import main
from linvit.io.signals import STOP

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
TINY = {  # the quickstart in about a second
    "model.backbone": {"name": "deit_nano", "depth": 1},
    "model.warmup_epochs": 0.5,
    "model.ema_decay": None,
    "model.predict_with": "raw",
    "data.batch_size": 16,
    "trainer.accelerator": "cpu",
    "trainer.max_epochs": 2,
    "trainer.limit_train_batches": 10,
    "trainer.limit_val_batches": 3,
    "trainer.log_every_n_steps": 1,
    "trainer.enable_progress_bar": False,
}


class Done(NamedTuple):
    """How a command ended and all it said."""

    code: int
    out: str
    err: str
    log: str


def linvit(*arguments: object, cwd: Path) -> Done:
    """`linvit ARGUMENTS` in a folder. What is not the user's mistake is raised."""
    out, err, log = io.StringIO(), io.StringIO(), io.StringIO()
    handler, logger = logging.StreamHandler(log), logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), undrawn():
            code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    finally:
        collect_garbage()
        logger.removeHandler(handler)
        STOP.release()  # a process would end now
    return Done(code, out.getvalue(), err.getvalue(), log.getvalue())


def collect_garbage():
    """A trainer and its network refer to one another, and of a large one there were soon several.

    What has been imported since stays, so that the next time takes milliseconds.
    """
    gc.collect()
    if len(sys.modules) > collect_garbage.modules:
        collect_garbage.modules = len(sys.modules)
        gc.freeze()


collect_garbage.modules = 0


@contextlib.contextmanager
def undrawn():
    """Pictures of confusion matrices are blank: drawing takes a fifth of a tiny run, and has tests of its own."""
    blank = np.zeros((8, 8, 3), np.uint8)
    with (
        mock.patch("linvit.callbacks.report.confusion_picture", return_value=blank),
        mock.patch("linvit.tasks.segmentation.task.confusion_picture", return_value=blank),
    ):
        yield


def flags(**options: object) -> list[str]:
    """`model__lr=1` as `--model.lr=1`."""
    return [f"--{name.replace('__', '.')}={value}" for name, value in options.items()]


def tiny(**options: object) -> list[str]:
    """The flags of a tiny run, some of them changed."""
    return flags(**{**{name.replace(".", "__"): value for name, value in TINY.items()}, **options})


def files(folder: Path) -> list[str]:
    """Everything below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The curves of a run folder: tag -> [(step, value)], its event files in order."""
    curves: dict[str, list[tuple[int, float]]] = {}
    numbers = re.compile(r"\d+")  # the last is that of the writer in its process: 10 is behind 9
    for file in sorted(
        folder.glob("events.out.tfevents.*"), key=lambda path: list(map(int, numbers.findall(path.name)))
    ):
        log = EventAccumulator(str(file)).Reload()
        for tag in log.Tags()["scalars"]:
            curves.setdefault(tag, []).extend((event.step, event.value) for event in log.Scalars(tag))
    return curves


class Run(NamedTuple):
    """A finished training run."""

    root: Path  # where it was started
    done: Done

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.root / "checkpoints" / "quickstart" / "version_0"

    @property
    def config(self) -> Path:
        """The saved configuration."""
        return self.folder / "config.yaml"

    def checkpoint(self, name: str) -> Path:
        """`best` or `last`."""
        return self.folder / "checkpoints" / f"{name}.ckpt"

    def then(self, verb: str, *arguments: object, checkpoint: str = "best", cwd: Path | None = None) -> Done:
        """Another verb on the saved configuration and a checkpoint."""
        saved = [f"--config={self.config}", f"--ckpt_path={self.checkpoint(checkpoint)}"]
        return linvit(verb, *saved, *arguments, cwd=cwd or self.root)


def train(root: Path, *arguments: object) -> Run:
    """Trains the tiny quickstart in a folder."""
    done = linvit("fit", f"--config={QUICKSTART}", *tiny(), *arguments, cwd=root)
    assert done.code == 0, done.err
    return Run(root, done)
