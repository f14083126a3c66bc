"""A tiny model, random images, and a quiet trainer for tests of whole steps."""

import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from torch.utils.data import DataLoader, Dataset, default_collate

from linvit.tasks import ClassificationTask

SIDE, PATCH, HEAD_WIDTH, CLASSES = 16, 4, 8, 7
TINY = {"name": "deit_tiny", "depth": 1, "embed_dim": 3 * HEAD_WIDTH, "patch_size": PATCH}  # 3 heads, 1 + 16 tokens


class KeepFirst(Callback):
    """Copies the last.ckpt of the first epoch to first.ckpt beside it."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        (folder,) = (callback.dirpath for callback in trainer.checkpoint_callbacks if hasattr(callback, "dirpath"))
        last, first = Path(folder, "last.ckpt"), Path(folder, "first.ckpt")
        if trainer.current_epoch == 1 and trainer.is_global_zero and last.exists() and not first.exists():
            shutil.copy(last, first)


class RandomImages(Dataset[dict[str, Any]]):
    """Reproducible noise (3, 16, 16) with a class, an index and a name each."""

    def __init__(self, count: int, side: int = SIDE, classes: int = CLASSES) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(count, 3, side, side, generator=generator)
        self.labels = torch.randint(classes, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "image": self.images[index],
            "label": int(self.labels[index]),
            "index": index,
            "id": f"{index}.png",
        }


def batches(count: int, batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    """Random images in batches, in order."""
    return DataLoader(RandomImages(count, **options), batch_size, collate_fn=batch)


def batch(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Samples as a batch with a seed, from which mixing is drawn."""
    return {**default_collate(samples), "seed": samples[0]["index"]}


def tiny_task(**options: Any) -> ClassificationTask:
    """A classification task small enough for milliseconds, the same one for the same arguments."""
    torch.manual_seed(0)
    return ClassificationTask(**{"backbone": TINY, "num_classes": CLASSES, "img_size": SIDE, **options})


class Memory(Logger):
    """Keeps what is logged: tag -> [(step, value)]."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[tuple[int, float]]] = {}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Is told the hyper-parameters; keeps none."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        for tag, value in metrics.items():
            self.values.setdefault(tag, []).append((-1 if step is None else step, value))


def trainer(folder: Path, **options: Any) -> Trainer:
    """A trainer on the CPU that writes and prints nothing."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return Trainer(**{"accelerator": "cpu", "default_root_dir": folder, **quiet, **options})


def fit(task: LightningModule, folder: Path, count: int = 16, **options: Any) -> Trainer:
    """Trains on random images, for one epoch of two batches unless told otherwise."""
    runner = trainer(folder, **{"max_epochs": 1, **options})
    runner.fit(task, batches(count))
    return runner
