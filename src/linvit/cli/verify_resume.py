"""`linvit verify-resume`: interrupts a run of one's own configuration, and compares it with one that is not."""

import argparse
import csv
import hashlib
import json
import logging
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linvit.errors import UserError
from linvit.files import LAST, PREVIOUS
from linvit.runs.configs import FLAG, arguments
from linvit.signals import STOP
from linvit.terminal import argument_parser, reflow

EPILOG = """examples:
  linvit verify-resume --config quickstart
  linvit verify-resume --config RUN/config.yaml --interruptions 5
  linvit verify-resume --config mine.yaml --data.num_workers=4

All options of linvit fit are taken. The run has epochs of 5 batches and is
written to a temporary folder. Compared is what lies in the run's folder,
without measured times. The exit code is 0 if the runs are bit-equal, else 1.
"""
SHORT: dict[str, Any] = {  # options of the trainer; those of the command line win
    "logger": None,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "limit_train_batches": 5,
    "limit_val_batches": 2,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 1,
}
COMPARED = {
    "state_dict": "weights",
    "optimizer_states": "optimiser",
    "lr_schedulers": "learning-rate schedule",
    "random_state": "random generators",
    "loops": "epochs and steps",
}


def main(argv: list[str]) -> int:
    """Runs `linvit verify-resume`; prints the verdict and returns 0 if the runs are bit-equal, else 1."""
    parser = argument_parser("linvit verify-resume", __doc__, EPILOG)
    parser.allow_abbrev = False  # the other options are those of fit
    parser.add_argument("--interruptions", type=int, default=2, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="optimiser steps (default: %(default)s)")
    args, options = parser.parse_known_args(argv)
    if args.steps < 2 or not 1 <= args.interruptions < args.steps:
        raise UserError(
            f"a run of N steps can be interrupted 1 to N - 1 times; got --steps={args.steps} and "
            f"--interruptions={args.interruptions}"
        )
    if any(option.startswith(("--ckpt_path", "--resume")) for option in options):
        raise UserError("verify-resume starts a run of its own; leave out --ckpt_path and --resume")
    with tempfile.TemporaryDirectory(prefix="linvit-verify-resume-") as folder:
        return _verify(Path(folder), options, args)


def _verify(folder: Path, options: Sequence[str], args: argparse.Namespace) -> int:
    whole = ShortRun(folder / "whole", options)
    whole.train(args.steps)
    steps = whole.content["global_step"]
    if steps <= args.interruptions:
        raise UserError(f"the run ends after {steps} steps: too few for {args.interruptions} interruptions")
    parts = ShortRun(folder / "parts", options)
    stops = sorted(random.Random(args.steps).sample(range(1, steps), args.interruptions))
    for stop in [*stops, args.steps]:
        parts.train(stop)
    interrupted = f"{steps} steps, interrupted after {' and '.join(map(str, stops))}"
    one, other = files(whole.run), files(parts.run)
    different = differences({name: (one.get(name), other.get(name)) for name in one | other})
    if different:
        print(reflow(f"NOT equal after {interrupted}: {len(different)} entries differ, such as"))
        print("\n".join(f"  {line}" for line in different[:5]))
        print(reflow(f"Probable cause: {_cause(whole, folder, options, args.steps)}"))
        return 1
    print(reflow(f"bit-equal after {interrupted}: {', '.join(COMPARED.values())}, and what lies in the run's folder:"))
    print(reflow(", ".join(sorted(one))))
    return 0


class ShortRun:
    """A run that continues where it was each time."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        folder.mkdir()
        self.folder, self.options = folder, options
        self.content: dict[str, Any] = {}  # of the last checkpoint

    @property
    def run(self) -> Path:
        """Its folder."""
        return next(self.folder.glob("*/version_0"), self.folder)

    def train(self, step: int) -> None:
        """Trains up to a step, in a new process."""
        from linvit.weights import torch_file  # imports torch, which takes seconds

        start = f"from step {self.content['global_step']}" if self.content else "from the beginning"
        print(f"training {start} to step {step}", flush=True)
        callback = {"class_path": "linvit.callbacks.stop_on_signal.StopAt", "init_args": {"step": step}}
        own = self.folder / "short.yaml"
        trainer = SHORT | {"default_root_dir": str(self.folder), "callbacks+": [callback]}
        own.write_text(json.dumps({"trainer": trainer}), encoding="utf-8")
        configs, others = split(self.options)
        resumed = [f"--ckpt_path={self.run / 'checkpoints' / LAST}"] if self.content else []
        command = [sys.executable, "-m", "linvit", "fit", *configs, f"--config={own}", *others, *resumed]
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", errors="replace", check=False)
        checkpoint = self.run / "checkpoints" / LAST
        if done.returncode not in (0, STOP.exit_code(signal.SIGTERM)) or not checkpoint.is_file():
            said = done.stderr[-3000:]
            raise UserError(f"linvit fit failed with exit code {done.returncode}; its last words:\n{said}")
        self.content = torch_file.load(checkpoint, objects=False)


def files(run: Path) -> dict[str, Any]:
    """What a user reads in the folder of a run, by the names of files, without measured times and memory."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    from linvit.weights import torch_file

    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        if path.suffix == ".ckpt" and path.name != PREVIOUS:
            content = torch_file.load(path, objects=False)
            # how an epoch was parted by an interruption at its end is not a difference; only last.ckpt is resumed
            kept = [key for key in COMPARED if key in content and (key != "loops" or path.name == LAST)]
            found[path.name] = {key: content[key] for key in kept}
        elif path.name == "metrics.csv":
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            found[path.name] = [{tag: cell for tag, cell in row.items() if cell and not _measured(tag)} for row in rows]
        elif path.suffix in (".csv", ".png"):
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it says what it purges
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    for tag in events.Tags()["scalars"]:
        if not _measured(tag):
            found.setdefault("events", {})[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return found


def _measured(tag: str) -> bool:
    """Whether the values of a tag are times or memory, which no two runs share."""
    return tag.removeprefix("watch/").startswith(("images/s", "data_wait", "memory/"))


def split(options: Sequence[str]) -> tuple[list[str], list[str]]:
    """The configurations among options, and the others, which win over ours."""
    found = [*arguments(options)]
    configs = [part for _, config in found if config is not None for part in (FLAG, config)]
    return configs, [argument for argument, config in found if config is None]


def differences(pairs: Any, name: str = "") -> list[str]:
    """A line for each entry of nested pairs of states that differs, with the largest difference of tensors."""
    from torch import Tensor, equal

    found: list[str] = []
    for key, (one, other) in pairs.items():
        path = f"{name}/{key}" if name else str(key)
        if isinstance(one, list | tuple) and isinstance(other, list | tuple):
            one, other = dict(enumerate(one)), dict(enumerate(other))
        if isinstance(one, dict) and isinstance(other, dict):
            found += differences({key: (one.get(key), other.get(key)) for key in {**one, **other}}, path)
        elif isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
            if not equal(one, other):
                largest = (one.double() - other.double()).abs().max().item()
                found.append(f"{path}: differs by {largest:.3g} at most, of {one.double().abs().max().item():.3g}")
        elif isinstance(one, Tensor) or isinstance(other, Tensor) or one != other:
            found.append(f"{path}: {str(one)[:40]} and {str(other)[:40]}")
    return found


def _cause(whole: ShortRun, folder: Path, options: Sequence[str], steps: int) -> str:
    """Why the runs probably differ, by a third one without an interruption."""
    again = ShortRun(folder / "again", options)
    again.train(steps)
    if differences({"state_dict": (whole.content["state_dict"], again.content["state_dict"])}):
        return (
            "the training itself: two runs without an interruption differ, too. Try --trainer.deterministic=true, "
            "and --trainer.benchmark=false"
        )
    return (
        "something that training reads is not in the checkpoint, such as an attribute of a module or a callback that "
        "is neither a buffer nor in a state_dict; or a transform or a data set of your own draws from the generators "
        "of random, numpy or torch in a loader process"
    )
