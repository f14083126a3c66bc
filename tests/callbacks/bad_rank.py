"""Trains on two processes, of which the second meets a NaN: `python -m tests.callbacks.bad_rank FOLDER`."""

import json
import math
import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule

from linvit import UserError
from linvit.callbacks import NonFiniteGuard
from tests.training import RandomImages, batch, tiny_task, trainer


class Data(LightningDataModule):
    """Four batches of 4 images for each rank; of the second rank, some images have a pixel that is NaN."""

    def __init__(self, bad):
        super().__init__()
        self.bad = bad

    def train_dataloader(self):
        images = RandomImages(32)
        rank = self.trainer.global_rank
        images.images[[16 + row for row in self.bad], 0, 0, 0] = math.nan
        mine = torch.utils.data.Subset(images, range(16 * rank, 16 * rank + 16))
        return torch.utils.data.DataLoader(mine, 4, collate_fn=batch)


def run(folder, bad, **options):
    """What this rank has seen."""
    guard = NonFiniteGuard(stop_after=2)
    task = tiny_task(warmup_epochs=0, backbone={"name": "timm", "model": "resnet10t"}, img_size=32)
    runner = trainer(
        folder, max_epochs=1, devices=2, strategy="ddp", callbacks=[guard], use_distributed_sampler=False, **options
    )
    found = {"error": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            runner.fit(task, datamodule=Data(bad))
        except UserError as error:
            found["error"] = str(error)
    found["warnings"] = [str(one.message) for one in caught if "is skipped" in str(one.message)]
    found["skipped"] = guard.skipped
    state = task.state_dict()
    found["finite"] = all(bool(value.isfinite().all()) for value in state.values())
    found["weights"] = sum(weight.double().sum().item() for weight in task.parameters())
    return runner.global_rank, found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    results = [run(folder, [5]), run(folder, [5], accumulate_grad_batches=2), run(folder, range(16))]
    (folder / f"{results[0][0]}.json").write_text(json.dumps([found for _, found in results]), encoding="utf-8")
