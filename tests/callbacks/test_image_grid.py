"""The grids of transformed images in TensorBoard."""

import random

import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from linvit.callbacks import ImageGrid
from linvit.data import ClassificationData
from tests.training import tiny_task, trainer


class Dice(Callback):
    """Keeps the states of all random number generators at the start of training."""

    def __init__(self):
        self.states = []

    def on_train_start(self, runner, task):
        self.states.append((torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())))


def run(folder, *callbacks, logger=None):
    """One training step on the digits."""
    torch.manual_seed(0)
    data = ClassificationData("digits", batch_size=8, num_workers=0, img_size=16)
    task = tiny_task(num_classes=10)
    logger = TensorBoardLogger(folder, "") if logger is None else logger
    runner = trainer(
        folder, max_epochs=1, limit_train_batches=1, limit_val_batches=0, logger=logger, callbacks=[*callbacks]
    )
    runner.fit(task, data)
    return task


def test_one_grid_per_split_at_the_start(tmp_path):
    run(tmp_path, ImageGrid(12))
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    log = EventAccumulator(str(file)).Reload()
    assert log.Tags()["images"] == ["transforms/train", "transforms/val"]
    for tag in log.Tags()["images"]:
        (event,) = log.Images(tag)
        assert event.step == 0
        assert (event.height, event.width) == (38, 146)  # rows of eight 16x16 images, 2 pixels apart


def test_the_random_state_and_so_the_run_stay_as_they_were(tmp_path):
    before, after = Dice(), Dice()
    watched = run(tmp_path / "with", before, ImageGrid(4), after)
    assert before.states == after.states
    alone = run(tmp_path / "without")
    assert all(torch.equal(*pair) for pair in zip(watched.parameters(), alone.parameters(), strict=True))
