"""Runs of segmentation: interrupted ones equal those that are not, and several ranks equal one."""

import json
from collections import Counter

import pytest
import torch
from lightning.pytorch import Callback
from torch import distributed, nn
from torch.distributed.nn.functional import all_reduce

from tests.resuming import SEGMENTATION, differences, on_ranks, part, ranks, read, run, segmentation
from tests.training import trainer

pytestmark = pytest.mark.slow

STEPS = {"max_epochs": -1, "max_steps": 17, "check_val_every_n_epoch": None, "val_check_interval": 4}


@pytest.mark.parametrize("options", [{"max_epochs": 2}, STEPS], ids=["epochs", "steps"])
@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), (2, 2)])
def test_an_interrupted_run_is_bit_equal(tmp_path, workers, accumulate, options):
    """Epochs of seven batches, validation; dropout, drop path, moving average, auxiliary loss, running statistics."""
    loading, options = {"num_workers": workers}, {**options, "accumulate_grad_batches": accumulate}
    whole = run(tmp_path / "whole", [], loading, model=SEGMENTATION, **options)
    parts = run(tmp_path / "parts", [3, 5, 7], loading, model=SEGMENTATION, **options)
    assert whole["checkpoint"]["global_step"] == options.get("max_steps", 14 if accumulate == 1 else 8)
    assert differences(parts, whole) == []


def test_two_ranks_go_on_bit_equal(tmp_path):
    results = []
    for name, steps in (("whole", [10**6]), ("parts", [2, 5, 10**6])):
        folder, last = tmp_path / name, None
        folder.mkdir()
        for seed, step in enumerate(steps):
            last = ranks(folder, 2, step, seed, {"batch_size": 2}, last, SEGMENTATION)
        results.append(read(folder, last))
    assert differences(*results) == []


@pytest.mark.parametrize("layouts", [[1, 2], [2, 1]], ids=str)
def test_on_another_number_of_ranks_no_scene_comes_twice(tmp_path, layouts):
    """An epoch of 28 of the 29 scenes."""
    last, options = None, {"max_epochs": 1}
    for number, (world, step) in enumerate(zip(layouts, (3, 10**6), strict=True)):
        loading = {"batch_size": 4 // world}
        if world == 1:
            last = part(tmp_path, step, number, loading, last, SEGMENTATION, **options)
        else:
            last = ranks(tmp_path, world, step, number, loading, last, SEGMENTATION, **options)
    seen = read(tmp_path, last)
    counts = Counter(row for name in seen if name.startswith("samples") for line in seen[name] for row in line[2])
    assert len(counts) == 28
    assert set(counts.values()) == {1}


class Gradients(Callback):
    """Writes loss and gradients of the first step."""

    def __init__(self, path):
        self.path = path

    def on_before_optimizer_step(self, runner, module, optimizer):
        loss = runner.strategy.reduce(runner.callback_metrics["train/loss"].detach().clone(), reduce_op="mean")
        found = {name: parameter.grad.clone() for name, parameter in module.network.named_parameters()}
        statistics = {name: buffer.clone() for name, buffer in module.network.named_buffers() if "running" in name}
        if runner.is_global_zero:
            torch.save({"loss": loss, **found, **statistics}, self.path)


def synchronised(self, x):
    """BatchNorm over the images of all ranks; torch's own needs GPUs."""
    if not self.training:
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
    world = distributed.get_world_size() if distributed.is_initialized() else 1

    def mean(values):
        means = values.mean((0, 2, 3))
        return means if world == 1 else all_reduce(means) / world

    centre = mean(x)
    variance = mean((x - centre[:, None, None]) ** 2)
    count = world * x.numel() / x.shape[1]
    with torch.no_grad():
        self.running_mean.lerp_(centre, self.momentum)
        self.running_var.lerp_(variance * count / (count - 1), self.momentum)
    normal = (x - centre[:, None, None]) / (variance[:, None, None] + self.eps).sqrt()
    return normal * self.weight[:, None, None] + self.bias[:, None, None]


def test_two_ranks_have_the_loss_and_the_gradients_of_one(tmp_path, monkeypatch):
    """Means over all pixels, so that halves of a batch weigh the same; BatchNorm over both ranks."""
    still = {"drop_path_rate": 0.0, "head": {**SEGMENTATION["head"], "dropout": 0.0}}
    model = {**SEGMENTATION, **still}
    plain, found = nn.BatchNorm2d.forward, []
    monkeypatch.setattr(nn.BatchNorm2d, "forward", synchronised)
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        loading = {"batch_size": 4 // world, "num_workers": 0}
        callbacks = [Gradients(folder / "gradients")]
        if world == 1:
            part(folder, 1, 0, loading, None, model, callbacks)
            monkeypatch.setattr(nn.BatchNorm2d, "forward", plain)
            part(folder, 1, 0, loading, None, model, [Gradients(folder / "torch")])
            monkeypatch.setattr(nn.BatchNorm2d, "forward", synchronised)
            found.append(torch.load(folder / "torch"))
        else:
            ranks(folder, 2, 1, 0, loading, None, model, callbacks)
        found.append(torch.load(folder / "gradients"))
    scale = max(values.abs().max() for values in found[0].values())
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        for name, values in found[0].items():
            torch.testing.assert_close(other[name], values, rtol=1e-4, atol=1e-6 * float(scale), msg=name)


def test_scores_are_the_same_on_one_two_and_three_ranks(tmp_path):
    """Seven scenes: with three ranks one has three of them."""
    found = []
    for world in (1, 2, 3):
        folder = tmp_path / str(world)
        folder.mkdir()

        def score(world=world, folder=folder):
            torch.manual_seed(0)
            task, data = segmentation(SEGMENTATION, {"batch_size": 2, "num_workers": 0})
            kept = []
            task.on_validation_epoch_end = lambda: kept.append(task.metrics["val/"]["mIoU"].state.compute().tolist())
            ways = {"devices": world, "strategy": "ddp"} if world > 1 else {}
            runner = trainer(folder, **ways)
            scores = runner.validate(task, data, verbose=False)[0]
            if runner.is_global_zero:
                (folder / "scores").write_text(json.dumps([kept, scores]), encoding="utf-8")

        on_ranks(folder, world, score)
        found.append(json.loads((folder / "scores").read_text(encoding="utf-8")))
    for matrix, scores in found[1:]:
        assert matrix == found[0][0]
        assert scores.pop("val/loss") == pytest.approx(found[0][1]["val/loss"], rel=1e-6)
        assert scores == {name: value for name, value in found[0][1].items() if name != "val/loss"}
    assert sum(map(sum, found[0][0][0])) == 7 * 32 * 32
