"""What `NonFiniteGuard` costs: training steps with and without it, in turns, in one run.

    python -m benchmarks.non_finite_overhead --backbone deit_tiny --batch 16 --block 2 --blocks 20

The guard is switched on for a block of steps, then off for as many, and so on; which of a pair comes first alternates.
The ratio of a pair is time with it over time without; the median counts, and the middle half of the ratios says how far
it can be trusted. On a CPU that others use too, processor time is steadier, and steadier still is the share of it that
the guard's own methods take. The load average says how busy the machine was. On a GPU the clock is read after all of
its work is done, once per block, so take blocks of 20 steps or more.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from benchmarks.fit_overhead import Data, Images, now
from linvit.callbacks import NonFiniteGuard
from linvit.tasks import ClassificationTask


class Turns(Callback):
    """Switches the guard at the end of each block of steps, and keeps the time of each."""

    def __init__(self, guard: NonFiniteGuard, block: int) -> None:
        self.guard, self.block = guard, block
        self.seconds: list[np.ndarray] = []  # of the clock and of the processors
        self.enabled: list[bool] = []
        self.own = 0.0  # seconds of the processor within the guard's methods
        for name in [
            name for name in vars(NonFiniteGuard) if name.startswith(("on_train_batch", "on_before", "on_after"))
        ]:
            setattr(guard, name, self.timed(getattr(guard, name)))

    def timed(self, method: Callable[..., None]) -> Callable[..., None]:
        """The same, its time added up after the first pair of blocks."""

        def run(*args: Any, **kwargs: Any) -> None:
            begun = time.thread_time()
            method(*args, **kwargs)
            if len(self.seconds) >= 2:
                self.own += time.thread_time() - begun

        return run

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Begins a block; on, off, off, on, on, ..."""
        number, step = divmod(trainer.global_step, self.block)
        if step == 0:
            self.guard.enabled = number % 4 in (0, 3)
            self.begun = now()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Ends it."""
        if trainer.global_step % self.block == 0:
            self.seconds.append(now() - self.begun)
            self.enabled.append(self.guard.enabled)


def main() -> None:
    """Prints the median ratio of the pairs and its spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="deit_tiny")
    parser.add_argument("--img_size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--block", type=int, default=2, help="steps")
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks")
    parser.add_argument("--precision", default="bf16-mixed" if torch.cuda.is_available() else "32-true")
    asked = parser.parse_args()
    pairs = asked.blocks + 1  # the first is not counted
    torch.manual_seed(0)
    task = ClassificationTask(backbone=asked.backbone, img_size=asked.img_size, warmup_epochs=0)
    guard = NonFiniteGuard()
    turns = Turns(guard, asked.block)
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=1,
            precision=asked.precision,
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            callbacks=[guard, turns],
            default_root_dir=folder,
        )
        trainer.fit(task, datamodule=Data(Images(asked.batch, asked.img_size, 2 * pairs * asked.block)))
    seconds, enabled = np.array(turns.seconds)[2:].reshape(-1, 2, 2), np.array(turns.enabled)[2:].reshape(-1, 2)
    on, off = seconds[enabled], seconds[~enabled]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} threads"
    print(f"{asked.backbone}, {asked.img_size} px, batch {asked.batch}, {asked.precision}, {device}")
    for name, ratios, step in zip(("clock", "processor time"), (on / off).T, off.T / asked.block, strict=True):
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        print(f"by {name}: ratio {middle:.4f} ({low:.4f} to {high:.4f}), a step {np.median(step) * 1000:.1f} ms")
    own = turns.own / on[:, 1].sum()
    print(f"the guard's own methods: {own:.2%} of the processor time of a step")
    print(f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
