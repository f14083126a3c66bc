"""Runs that are interrupted after some optimiser steps and go on in a new trainer, model and data module."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor

from linvit.data import ClassificationData
from linvit.tasks import ClassificationTask
from tests.training import trainer

BACKBONE = {"name": "deit_tiny", "depth": 1, "embed_dim": 24, "patch_size": 4, "proj_drop": 0.2}
RANDOM = {"drop_path_rate": 0.3, "ema_decay": 0.9, "mixup_alpha": 0.8, "cutmix_alpha": 1.0}
SHORT = {"max_epochs": 2, "limit_train_batches": 7, "limit_val_batches": 1}


class StopHereError(Exception):
    """The process is gone."""


class Interrupt(Callback):
    """Writes a checkpoint after an optimiser step, and nothing happens after it."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise StopHereError


class Seen(Callback):
    """Which samples were trained on, with their augmentation, and what happened when."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, list[int], float]] = []  # epoch, indices, sum of the batch
        self.events: list[tuple[Any, ...]] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        self.samples.append((trainer.current_epoch, batch["index"].tolist(), batch["image"].double().sum().item()))
        self.events.append(("batch", trainer.current_epoch, trainer.global_step))

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.events.append(("validation", trainer.current_epoch, trainer.global_step))

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.events.append(("start", trainer.current_epoch, trainer.global_step))

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.events.append(("end", trainer.current_epoch, trainer.global_step))


def data(**options: Any) -> ClassificationData:
    """The embedded digits."""
    return ClassificationData("digits", **{"batch_size": 16, "img_size": 8, "seed": 5, **options})


def run(
    folder: Path, interruptions: list[int], loading: dict[str, Any], model: dict[str, Any] = RANDOM, **options: Any
) -> tuple[dict[str, Any], Seen]:
    """Trains, and is interrupted after some of the optimiser steps; the content of the last checkpoint.

    Each part of the run has another state of the random generators when it starts, as another process has.
    """
    seen, last = Seen(), None
    for part, step in enumerate([*interruptions, None]):
        seed_everything(part, verbose=False)
        os.environ.pop("PL_GLOBAL_SEED")
        torch.manual_seed(part)
        if part == 0:
            seed_everything(0, verbose=False)
            os.environ.pop("PL_GLOBAL_SEED")
        task = ClassificationTask(backbone=BACKBONE, num_classes=10, img_size=8, lr=1e-2, warmup_epochs=0.5, **model)
        ends = [] if step is None else [Interrupt(step, folder / f"{part}.ckpt")]
        runner = trainer(folder, callbacks=[seen, *ends], **{**SHORT, **options})
        try:
            runner.fit(task, datamodule=data(**loading), ckpt_path=last, weights_only=True)
        except StopHereError:
            last = folder / f"{part}.ckpt"
    runner.save_checkpoint(folder / "end.ckpt")
    return torch.load(folder / "end.ckpt", weights_only=True), seen


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Names of all entries of two nested structures that differ."""
    if isinstance(one, Tensor):
        same = isinstance(other, Tensor) and torch.equal(one, other)
        return [] if same else [name]
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() | other.keys()
        return [found for key in keys for found in differences(one.get(key), other.get(key), f"{name}/{key}")]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        return [
            found for i, (a, b) in enumerate(zip(one, other, strict=True)) for found in differences(a, b, f"{name}/{i}")
        ]
    return [] if one == other else [name]
