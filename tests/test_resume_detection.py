"""Runs of detection: interrupted ones equal those that are not, and a rank without any object stops no other."""

import json

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader

from linvit.data.transforms.detection import DetectionAugmentation
from linvit.tasks import DetectionTask
from tests.data.coco import annotation, write_coco
from tests.resuming import DETECTION, detection, differences, on_ranks, ranks, read, run
from tests.tasks.detection.squares import batch, collate, sample
from tests.test_resume_segmentation import Gradients
from tests.training import trainer

pytestmark = pytest.mark.slow

ALL = 10**6  # samples of anchors and proposals: none is drawn
HEADS = {
    "retinanet": {"width": 8, "convs": 1},
    "mask_rcnn": {"width": 8, "fc_width": 8, "anchor_samples": ALL, "roi_samples": ALL},
    "cascade_mask_rcnn": {"width": 8, "fc_width": 8, "anchor_samples": ALL, "roi_samples": ALL},
}
FULL, EMPTY = (1, 2, 3), (0, 5, 10)  # images


@pytest.mark.parametrize(("workers", "accumulate", "steps"), [(0, 1, 14), (2, 2, 8)])
def test_an_interrupted_run_is_bit_equal(tmp_path, workers, accumulate, steps):
    """Epochs of seven batches with validation; samples of anchors and proposals, drop path, moving average."""
    loading, options = {"num_workers": workers}, {"model": DETECTION, "accumulate_grad_batches": accumulate}
    whole = run(tmp_path / "whole", [], loading, **options)
    parts = run(tmp_path / "parts", [3, 5, 7], loading, **options)
    assert whole["checkpoint"]["global_step"] == steps
    assert differences(parts, whole) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_by_aspect_go_on_bit_equal(tmp_path, workers):
    """Photos of several sizes in a folder like COCO's, in multi-scale training with crops."""
    sizes = {key: (32 + key % 3 * 8, 40) for key in range(29)}
    categories = [{"id": 3 * label + 1, "name": str(label)} for label in range(10)]
    found = [annotation(key, key, 3 * (key % 10) + 1) for key in sizes]
    write_coco(tmp_path / "coco", found=found, sizes=sizes, categories=categories)
    given = DetectionAugmentation(0.5, (32, 48), (40, 48), (24, 40))
    loading = {
        "source": str(tmp_path / "coco"),
        "resize_limits": (64, 48),
        "augmentation": given,
        "num_workers": workers,
    }
    whole = run(tmp_path / "whole", [], loading, model=DETECTION)
    parts = run(tmp_path / "parts", [3, 5, 11], loading, model=DETECTION)
    assert whole["checkpoint"]["global_step"] == 14
    assert differences(parts, whole) == []


def test_two_ranks_go_on_bit_equal(tmp_path):
    results = []
    for name, steps in (("whole", [10**6]), ("parts", [2, 5, 10**6])):
        folder, last = tmp_path / name, None
        folder.mkdir()
        for seed, step in enumerate(steps):
            last = ranks(folder, 2, step, seed, {"batch_size": 2}, last, DETECTION)
        results.append(read(folder, last))
    assert differences(*results) == []


class Unequal(LightningDataModule):
    """Objects on the first rank alone."""

    def train_dataloader(self):
        given = FULL if self.trainer.global_rank == 0 else EMPTY
        return DataLoader([sample(index, training=True) for index in given], batch_size=3, collate_fn=collate)


def task_with(head):
    torch.manual_seed(0)
    spec = {"name": head, **HEADS[head]}
    return DetectionTask(backbone=DETECTION["backbone"], head=spec, num_classes=2, img_size=32, warmup_epochs=0)


@pytest.mark.parametrize("head", HEADS)
def test_a_rank_without_objects_has_losses_and_gradients(tmp_path, head):
    """They are the mean of those of both batches, each on its own; BatchNorm is over each rank's, as on processors."""

    def train():
        callbacks = [Gradients(tmp_path / "found")]
        ways = {
            "devices": 2,
            "strategy": "ddp",
            "max_epochs": 1,
            "limit_val_batches": 0,
            "use_distributed_sampler": False,
        }
        trainer(tmp_path, callbacks=callbacks, **ways).fit(task_with(head), datamodule=Unequal())

    on_ranks(tmp_path, 2, train)
    found, task = torch.load(tmp_path / "found"), task_with(head)
    losses = [task.training_loss(batch(given, training=True)) for given in (FULL, EMPTY)]
    (sum(losses) / 2).backward()
    torch.testing.assert_close(found["loss"], sum(losses).detach() / 2)
    gradients = {name: parameter.grad for name, parameter in task.network.named_parameters()}
    scale = float(max(gradient.abs().max() for gradient in gradients.values()))
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6 * scale, msg=name)


def test_figures_are_the_same_on_one_and_three_ranks(tmp_path):
    """Seven scenes: one of three ranks has three of them."""
    found = []
    for world in (1, 3):
        folder = tmp_path / str(world)
        folder.mkdir()

        def score(world=world, folder=folder):
            torch.manual_seed(0)
            task, data = detection(DETECTION, {"batch_size": 2, "num_workers": 0})
            ways = {"devices": world, "strategy": "ddp"} if world > 1 else {}
            runner = trainer(folder, **ways)
            scores = runner.validate(task, data, verbose=False)[0]
            (folder / str(runner.global_rank)).write_text(json.dumps(scores), encoding="utf-8")

        on_ranks(folder, world, score)
        found += [json.loads((folder / str(rank)).read_text(encoding="utf-8")) for rank in range(world)]
    assert "val/mask_AP" in found[0]
    assert all(scores == found[0] for scores in found)
