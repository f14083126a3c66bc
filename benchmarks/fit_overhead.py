"""Images per second of `linvit fit` against a bare PyTorch loop: same model, batch, precision and images.

    python benchmarks/fit_overhead.py --backbone deit_tiny --batch 16 --steps 20 --rounds 5

Both train on the same random images, which lie in memory, so that no loader blurs the comparison. `fit` runs with the
Trainer's loops and with every callback and logger that the command line adds; neither validates. Rounds alternate, and
each gives a ratio, so that a machine that slows down hurts both; the median ratio counts. On a CPU that others use too,
the ratio by processor time is the steadier one.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from linvit.runs.loggers import run_loggers
from linvit.runs.trainer import add_displays, default_callbacks
from linvit.tasks import ClassificationTask
from linvit.tasks.parameter_groups import parameter_groups

WARM_UP = 3  # steps that are not timed


class Images(Dataset[int]):
    """One batch of random images, over and over: a sample is nothing, and to collate is to take the batch."""

    def __init__(self, batch: int, side: int, steps: int) -> None:
        self.size = batch
        self.batch = {"image": torch.randn(batch, 3, side, side), "label": torch.randint(1000, (batch,))}
        self.steps = steps

    def __len__(self) -> int:
        return self.steps * self.size

    def __getitem__(self, index: int) -> int:
        return index

    def collate(self, samples: list[int]) -> dict[str, Any]:
        """The batch."""
        return self.batch


class Data(LightningDataModule):
    """Whole batches, ready to use."""

    def __init__(self, images: Images) -> None:
        super().__init__()
        self.images = images

    def train_dataloader(self) -> DataLoader[Any]:
        """The same as the bare loop's."""
        return loader(self.images)


class Clock(Callback):
    """The time from the end of the warm-up to the end of training."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Starts after the warm-up."""
        if trainer.global_step == WARM_UP:
            self.begun = now()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops."""
        self.seconds = now() - self.begun


def now() -> np.ndarray:
    """Seconds of the clock and of this process's processors, once the GPU has done all of its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return np.array([time.perf_counter(), time.process_time()])


def loader(images: Images) -> DataLoader[Any]:
    """The images as both get them."""
    return DataLoader(images, images.size, collate_fn=images.collate, pin_memory=torch.cuda.is_available())


def bare(task: ClassificationTask, images: Images, precision: str) -> np.ndarray:
    """Seconds of a loop as one writes it by hand."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = task.network.to(device).train()
    optimizer = torch.optim.AdamW(parameter_groups(task, 1e-3, 0.05), lr=1e-3)
    begun = now()
    for step, batch in enumerate(loader(images)):
        if step == WARM_UP:
            begun = now()
        image, label = batch["image"].to(device, non_blocking=True), batch["label"].to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = F.cross_entropy(network(image), label, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return now() - begun


def fit(task: ClassificationTask, images: Images, precision: str, every: int, folder: Path) -> np.ndarray:
    """Seconds of Lightning's loop with all that `linvit fit` adds to it."""
    clock = Clock()
    callbacks = [*default_callbacks(), clock]
    add_displays(callbacks, summary=False)
    trainer = Trainer(
        max_epochs=1,
        precision=precision,
        log_every_n_steps=every,
        logger=run_loggers([], folder / "run", None, None),
        callbacks=callbacks,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(task, datamodule=Data(images))
    return clock.seconds


def main() -> None:
    """Prints one line per round, and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="deit_tiny")
    parser.add_argument("--img_size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="bf16-mixed" if torch.cuda.is_available() else "32-true")
    parser.add_argument("--log_every_n_steps", type=int, default=50)
    asked = parser.parse_args()
    images = Images(asked.batch, asked.img_size, asked.steps + WARM_UP)
    options = {"backbone": asked.backbone, "img_size": asked.img_size, "warmup_epochs": 0, "lr": 1e-3}
    ratios = []
    for number in range(asked.rounds):
        seconds = {}
        for name in ("bare", "fit") if number % 2 == 0 else ("fit", "bare"):
            torch.manual_seed(0)
            task = ClassificationTask(**options)
            with tempfile.TemporaryDirectory() as folder:
                if name == "bare":
                    seconds[name] = bare(task, images, asked.precision)
                else:
                    seconds[name] = fit(task, images, asked.precision, asked.log_every_n_steps, Path(folder))
        ratios.append(seconds["bare"] / seconds["fit"])
        rates = {name: asked.batch * asked.steps / passed[0] for name, passed in seconds.items()}
        print(
            f"round {number}: fit {rates['fit']:.2f}, bare {rates['bare']:.2f} images/s, ratio {ratios[-1][0]:.3f}, "
            f"by processor time {ratios[-1][1]:.3f}"
        )
    clock, processor = np.median(ratios, axis=0)
    print(
        f"{asked.backbone}, {asked.img_size} px, batch {asked.batch}, {asked.precision}, {torch.get_num_threads()} "
        f"threads: median ratio {clock:.3f}, by processor time {processor:.3f}"
    )


if __name__ == "__main__":
    main()
