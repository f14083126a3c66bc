"""Trains and validates on one process, or on each of two."""

import json
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader

from linvit.callbacks import ClassReport, ImageCount
from linvit.data.loading.sampler import EvalSampler
from tests.training import RandomImages, tiny_task


class Odd(LightningDataModule):
    """17 images to train on and to validate with, dealt out without padding."""

    def train_dataloader(self):
        return DataLoader(RandomImages(16), 4)

    def val_dataloader(self):
        images = RandomImages(17)
        mine = EvalSampler(17, self.trainer.global_rank, self.trainer.world_size)
        return DataLoader(Rows(images), 4, sampler=mine)


class Rows(torch.utils.data.Dataset):
    """Images by what the sampler hands out."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, draw):
        return self.images[draw.row]


def run(folder, devices, checkpoint=None):
    """Trains for an epoch unless there is a checkpoint; what was scored, on this process."""
    torch.manual_seed(0)
    # Batch norm: buffers, which DistributedDataParallel would exchange in every forward pass.
    task = tiny_task(backbone={"name": "timm", "model": "resnet10t"}, img_size=32, ema_decay=0.5)
    report, counter = ClassReport(Path(folder) / "report"), ImageCount()
    losses, training_loss = [], task.training_loss
    task.training_loss = lambda batch: losses.append(training_loss(batch)) or losses[-1]
    runner = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[report, counter],
    )
    found = {}
    if checkpoint is None:
        runner.fit(task, datamodule=Odd())
        found["scores"] = {n: v.item() for n, v in runner.callback_metrics.items() if n.startswith("val/")}
        found["train/loss"] = runner.callback_metrics["train/loss"].item()
        found["last_loss"] = losses[-1].item()
        found["average"] = sum(weight.double().sum().item() for weight in task.ema.network.parameters())
        checkpoint = Path(folder) / "x.ckpt"
        runner.save_checkpoint(checkpoint)
    (found["validated"],) = runner.validate(
        task, datamodule=Odd(), ckpt_path=checkpoint, weights_only=True, verbose=False
    )
    found["images"] = counter.images
    found["rank"] = runner.global_rank
    return found


def write(folder, devices):
    """Writes what was scored on this process; the exit code."""
    found = run(folder, devices)
    (folder / f"{found['rank']}.json").write_text(json.dumps(found))
    return 0
