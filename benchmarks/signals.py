"""Sends signals to runs at random moments: exit codes, steps lost, and whether the next start continues.

    python benchmarks/signals.py            # 20 of each signal, to one process and to one or both of two
    python benchmarks/signals.py --runs 5

A signal comes in start-up, at a random step, in validation, or while a checkpoint is written, in turn, with a random
delay. To "all" ranks it comes at different times. Two ranks are started as torchrun does or as Lightning does, in turn.
"""

import argparse
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as linvit does, before torch is imported
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from lightning.pytorch import Callback

import linvit.cli.training.command_line  # noqa: F401  # once, and not in every process
from tests.cli.forked import Ranks
from tests.cli.runs import QUICKSTART, tiny

SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT")
MOMENTS = ("start-up", "step", "validation", "save")
RECEIVERS = {"one process": (1, [0]), "all of 2": (2, [0, 1]), "rank 0 of 2": (2, [0]), "rank 1 of 2": (2, [1])}
PATIENCE = 180.0  # seconds after which a run hangs, its start included
START_UP = 1.5  # seconds within which a signal comes in start-up
EPOCH = 10  # steps


class Send(Callback):
    """Sends this rank a signal at a moment, and writes down after which step it came."""

    def __init__(self) -> None:
        self.number, self.moment, self.step, self.delay, self.file = self.plan

    plan = (0, "", 0, 0.0, Path())

    def on_train_batch_start(self, trainer, *args):
        """In a step."""
        if self.moment == "step" and trainer.global_step == self.step:
            self.send(trainer)

    def on_validation_batch_start(self, trainer, *args):
        """In validation."""
        if self.moment == "validation" and trainer.global_step >= EPOCH:
            self.send(trainer)

    def on_save_checkpoint(self, trainer, *args):
        """In a save."""
        if self.moment == "save" and trainer.global_step >= EPOCH:
            self.send(trainer)

    def send(self, trainer):
        """Sends the signal in a moment, once."""
        self.moment = ""
        threading.Thread(target=self._send, args=(trainer,), daemon=True).start()

    def _send(self, trainer):
        time.sleep(self.delay)
        self.file.write_text(str(trainer.global_step), encoding="utf-8")
        os.kill(os.getpid(), self.number)


def kill_at(seconds: float, number: int) -> None:
    """Sends this process a signal after a time."""
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


def one_run(root: Path, by: str, receiver: str, moment: str, launcher: str) -> tuple[str, int, str]:
    """Runs once and resumes: what was wrong, the steps lost, and the output."""
    world, receivers = RECEIVERS[receiver]
    number = getattr(signal, by)
    seed = random.random()
    step, marks = random.randrange(1, 18), [root / f"sent-{rank}" for rank in range(world)]

    def before(rank: int) -> None:
        random.seed(f"{seed} {rank}")
        if rank in receivers and moment == "start-up":
            kill_at(random.uniform(0, START_UP), number)
        at = moment if rank in receivers else ""
        Send.plan = (number, at, step, random.uniform(0, 0.05), marks[rank])

    fit = ["fit", f"--config={QUICKSTART}", *tiny(trainer__max_epochs=1000, trainer__limit_val_batches=10)]
    run = Ranks([*fit, "--trainer.callbacks+=benchmarks.signals.Send"], root, world, launcher, before=before)
    codes, left = run.wait(PATIENCE), run.left()
    expected = {130 if by == "SIGINT" else 143}
    if moment == "start-up" and world == 2 and launcher == "torchrun":
        expected.add(143)  # torchrun sends SIGTERM to the others
    wrong = []
    if not expected.issuperset(codes):
        wrong.append(f"exit codes {codes}")
    if left:
        wrong.append("processes left")
    if "Traceback" in run.text():
        wrong.append("traceback")
    done = max([int(mark.read_text(encoding="utf-8")) for mark in marks if mark.exists()], default=0)
    saved = max([torch.load(last, weights_only=True)["global_step"] for last in root.rglob("last.ckpt")], default=0)
    text = run.text()
    run = Ranks([*fit, "--resume=auto", f"--trainer.max_steps={saved + 3}"], root, world, launcher)
    if any(code != 0 for code in run.wait(PATIENCE)) or run.left():
        wrong.append("the next start does not continue")
        text += run.text()
    return ", ".join(wrong), max(0, done - saved), text


def main() -> None:
    """Prints a row for each signal and receiver."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="Of each signal and receiver.")
    parser.add_argument("--signals", nargs="+", default=SIGNALS, choices=SIGNALS)
    parser.add_argument("--moments", nargs="+", default=MOMENTS, choices=MOMENTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    torch.set_num_threads(1)
    print("| signal | to | runs | start-up, step, validation, save | wrong | steps lost, at most | slowest, s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    failed = 0
    for by, receiver in itertools.product(options.signals, RECEIVERS):
        moments, lost, slowest, wrong = Counter(), 0, 0.0, 0
        for index in range(options.runs):
            moment = options.moments[index % len(options.moments)]
            launcher = ("torchrun", "lightning")[index // len(options.moments) % 2]
            root, start = Path(tempfile.mkdtemp()), time.monotonic()
            error, steps, text = one_run(root, by, receiver, moment, launcher)
            slowest, lost = max(slowest, time.monotonic() - start), max(lost, steps)
            moments[moment] += 1
            if error or steps > 1:
                wrong += 1
                print(f"{by} to {receiver}, {moment}, {launcher}: {error}; {steps} steps lost\n{text}", file=sys.stderr)
            shutil.rmtree(root)
        counts = ", ".join(str(moments[moment]) for moment in MOMENTS)
        print(f"| {by} | {receiver} | {options.runs} | {counts} | {wrong} | {lost} | {slowest:.0f} |", flush=True)
        failed += wrong
    sys.exit(bool(failed))


if __name__ == "__main__":
    from benchmarks.signals import main as run  # so that the callback has the name by which the runs know it

    run()
