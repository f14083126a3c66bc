"""Steps that are not finite: skipped without a trace, named, counted, and the end of a run if they persist."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from linvit import UserError
from linvit.callbacks import NonFiniteGuard
from linvit.tasks.base import Task
from linvit.tasks.parameter_groups import adamw
from tests.training import CLASSES, Memory, RandomImages, batch, tiny_task, trainer


class Net(nn.Module):
    """A convolution, BatchNorm, a classifier."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 4, 4)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images):
        return self.head(self.norm(self.conv(images)).mean((2, 3)))


def with_batch_norm(**options):
    task = tiny_task(warmup_epochs=0, **options)
    task.network = Net()
    if task.ema is not None:
        task.ema = type(task.ema)(task.network, options["ema_decay"])
    return task


class Watch(Callback):
    """All that a step may change, before and after it."""

    def __init__(self):
        self.steps = []

    def state(self, task, trainer):
        moments = [value for slots in trainer.optimizers[0].state.values() for value in slots.values()]
        moments = [value for value in moments if value.any()]  # the first step begins with zeros, also if it is skipped
        running = [b for name, b in task.network.named_buffers() if "running" in name]
        return [value.detach().clone() for value in [*task.network.parameters(), *running, *moments]]

    def on_train_batch_start(self, trainer, task, *args):
        self.before = self.state(task, trainer)

    def on_train_batch_end(self, trainer, task, *args):
        after = self.state(task, trainer)
        same = len(after) == len(self.before) and all(map(torch.equal, self.before, after))
        self.steps.append("same" if same else "changed")


def fit(task, folder, *callbacks, bad=(), guard=None, count=32, **options):
    """Trains on batches of 4 images; those of the numbers `bad` have a pixel that is NaN."""
    images = RandomImages(count)
    for number in bad:
        images.images[number, 0, 5, 5] = math.nan
    guard = NonFiniteGuard() if guard is None else guard
    runner = trainer(folder, **{"max_epochs": 1, "callbacks": [*callbacks, guard], **options})
    loader = torch.utils.data.DataLoader(images, 4, collate_fn=batch)
    runner.fit(task, loader, val_dataloaders=loader if options.get("limit_val_batches") else None)
    return runner, guard


def all_finite(task):
    return all(value.isfinite().all() for value in task.state_dict().values())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ({}, {}),
        ({"grad_checkpointing": True}, {}),
        pytest.param({"compile": True}, {"gradient_clip_val": 1.0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_bad_pixel_skips_one_step_and_names_layer_and_sample(tmp_path, kind, options):
    task, watch, memory = tiny_task(warmup_epochs=0, **kind), Watch(), Memory()
    with pytest.warns(
        UserWarning, match=r"step 1 is skipped.*'patch_embed.proj' \(Conv2d\), for 1 of 4.*'6.png'.*imag"
    ):
        runner, guard = fit(task, tmp_path, watch, bad=[6], logger=memory, **options)
    assert watch.steps == ["changed", "same", *["changed"] * 6]
    assert (guard.skipped, guard.in_a_row, runner.global_step) == (1, 0, 8)
    assert [value for _, value in memory.values["skipped_steps"]] == [0, *[1.0] * 7]
    assert all_finite(task)


def test_a_run_without_bad_steps_is_bit_for_bit_the_same(tmp_path):
    states = []
    for enabled in (True, False):
        task = with_batch_norm(ema_decay=0.9)
        fit(task, tmp_path, guard=NonFiniteGuard(enabled), gradient_clip_val=1.0, accumulate_grad_batches=2)
        states.append(task.state_dict())
    assert all(map(torch.equal, *(state.values() for state in states)))


def test_a_report_changes_no_random_numbers(tmp_path):
    drawn = []
    for bad in ([], [6]):
        task = tiny_task(drop_path_rate=0.5, warmup_epochs=0)
        fit(task, tmp_path, bad=bad)
        drawn.append(torch.rand(1))
    assert drawn[0] == drawn[1]


def test_one_bad_micro_batch_skips_the_whole_step(tmp_path):
    task, watch = tiny_task(warmup_epochs=0), Watch()
    with pytest.warns(UserWarning, match=r"step 1 is skipped.* '13.png'"):
        _, guard = fit(task, tmp_path, watch, bad=[13], accumulate_grad_batches=2)  # batch 3 of 0..7, the second of two
    assert watch.steps == ["same", "changed", "same", "same", "same", "changed", "same", "changed"]
    with pytest.warns(UserWarning, match=r"step 1 is skipped.* '9.png'"):
        fit(tiny_task(warmup_epochs=0), tmp_path, bad=[9], accumulate_grad_batches=2)  # the first of two
    assert guard.skipped == 1


class Spoil(Callback):
    """Sets a weight to NaN before a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, task, *args):
        if trainer.global_step == self.step:
            with torch.no_grad():
                task.network.blocks[0].mlp.fc1.weight[3, 4] = math.nan


def test_weights_that_are_nan_end_the_run_at_once_and_are_not_saved(tmp_path):
    kept = ModelCheckpoint(tmp_path, "last", every_n_train_steps=1, save_weights_only=True)
    options = {"enable_checkpointing": True, "max_epochs": 3}
    with (
        pytest.warns(UserWarning, match="step 3"),
        pytest.raises(UserError, match="at step 3: the weights are not") as error,
    ):
        fit(tiny_task(), tmp_path, kept, Spoil(3), **options)
    for part in (
        "'blocks.0.mlp.fc1' (Linear), for 4 of 4 samples: '12.png'",
        "'network.blocks.0.mlp.fc1.weight'",
        "--model.lr",
        "Checkpoints are from before",
    ):
        assert part in str(error.value)
    task = tiny_task()
    task.load_state_dict(torch.load(tmp_path / "last.ckpt")["state_dict"])
    assert all_finite(task)


@pytest.mark.parametrize("where", ["weights", "average", "statistics", "optimiser"])
def test_nothing_that_is_not_finite_is_saved(tmp_path, where):
    task = with_batch_norm(ema_decay=0.5)
    runner, _ = fit(task, tmp_path, guard=NonFiniteGuard(enabled=False))
    spoilt = {
        "weights": task.network.head.weight,
        "average": task.ema.network.head.weight,
        "statistics": task.network.norm.running_var,
        "optimiser": runner.optimizers[0].state[task.network.head.weight]["exp_avg_sq"],
    }[where]
    spoilt.data[-1] = math.inf
    with pytest.raises(UserError, match="not finite at step 8, so it is not saved"):
        runner.save_checkpoint(tmp_path / "one.ckpt")
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_run_of_nothing_but_bad_steps_is_no_success(tmp_path):
    with pytest.warns(UserWarning, match="step 0"), pytest.raises(UserError, match="in 4 steps in a row"):
        fit(tiny_task(), tmp_path, bad=range(16), count=16)


class BadBackward(torch.autograd.Function):
    """The identity, with a gradient of inf."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.inf


class Broken(nn.Module):
    def forward(self, x):
        return BadBackward.apply(x)


def test_the_layer_whose_gradient_is_not_finite_is_named(tmp_path):
    task = tiny_task(grad_checkpointing=True)
    task.network.blocks[0].mlp.act = Broken()
    said = r"gradient of layer 'blocks.0.mlp.act' \(Broken\), in BadBackward"
    with pytest.warns(UserWarning, match=said), pytest.raises(UserError, match="in 2 steps"):
        fit(task, tmp_path, guard=NonFiniteGuard(stop_after=2))
    assert all_finite(task)


def test_a_loss_that_is_infinite_skips_the_step_though_its_gradient_is_finite(tmp_path, monkeypatch):
    task, watch = tiny_task(warmup_epochs=0), Watch()
    plain = task.training_loss
    monkeypatch.setattr(task, "training_loss", lambda b: plain(b) + (math.inf if b["index"][0] == 4 else 0))
    with pytest.warns(UserWarning, match="step 1 is skipped.* The first is the loss"):
        fit(task, tmp_path, watch)
    assert watch.steps == ["changed", "same", *["changed"] * 6]


@pytest.mark.parametrize("fused", [True, False])
def test_either_optimiser_skips(tmp_path, monkeypatch, fused):
    """The fused one is told on the device; the other one, of other devices, has no gradient."""
    given = []
    monkeypatch.setattr("linvit.tasks.base.adamw", lambda *args: given.append(args[-1]) or adamw(*args[:-1], fused))
    task, watch = with_batch_norm(ema_decay=0.5), Watch()
    with pytest.warns(UserWarning, match="'9.png'"):
        fit(task, tmp_path, watch, bad=[9], gradient_clip_val=1.0, precision="bf16-mixed")
    assert given == [True]
    assert watch.steps == [*["changed"] * 2, "same", *["changed"] * 5]
    assert all_finite(task)


class Done:
    """A GPU that has done all of its work."""

    def synchronize(self):
        pass


def test_on_a_gpu_a_step_is_reported_one_batch_later(tmp_path, monkeypatch):
    monkeypatch.setattr("linvit.callbacks.non_finite._work_so_far", lambda device: Done())
    task, watch = with_batch_norm(), Watch()
    with pytest.warns(UserWarning, match=r"step 2 is skipped.*'17.png'"):
        _, guard = fit(task, tmp_path, watch, bad=[17], accumulate_grad_batches=2)
    assert guard.skipped == 1
    with pytest.warns(UserWarning, match=r"step 3 is skipped.*'31.png'"):  # the last of the run
        fit(with_batch_norm(), tmp_path, bad=[31], accumulate_grad_batches=2)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"precision": "bf16-mixed", "gradient_clip_val": 1.0}, {"precision": "16-mixed"}])
def test_on_a_gpu(tmp_path, options):
    task, watch = with_batch_norm(ema_decay=0.5), Watch()
    with pytest.warns(UserWarning, match=r"step 2 is skipped.*'conv' \(Conv2d\), for 1 of 4 samples: '9.png'"):
        fit(task, tmp_path, watch, bad=[9], accelerator="gpu", devices=1, **options)
    assert watch.steps[2] == "same"
    assert watch.steps[-1] == "changed"
    assert all_finite(task)


@pytest.mark.parametrize("before", [False, True])
def test_the_state_of_an_optimiser_moves_between_fused_and_plain(before):
    weight = nn.Parameter(torch.ones(3))
    first, second = (adamw([{"params": [weight]}], 0.1, (0.9, 0.99), fused) for fused in (before, not before))
    weight.grad = torch.ones(3)
    first.step()
    second.load_state_dict(first.state_dict())
    second.step()
    assert bool(second.param_groups[0]["fused"]) is not before
    assert second.state[weight]["step"] == 2


def half(scale):
    """16-mixed on the CPU, with a first scale of the loss."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))


def test_the_search_of_the_loss_scaler_does_not_count(tmp_path):
    task, watch = tiny_task(warmup_epochs=0), Watch()
    with pytest.warns(UserWarning, match="step 14 is skipped.*'patch_embed.proj'.*'58.png'"):
        _, guard = fit(task, tmp_path, watch, bad=[58], count=64, plugins=half(2.0**28), guard=NonFiniteGuard(True, 2))
    assert watch.steps[:3] == ["same"] * 3
    assert watch.steps[12:15] == ["changed", "changed", "same"]
    assert guard.skipped == 1
    assert all_finite(task)


@pytest.mark.parametrize(("scale", "steps"), [(8.0, {"changed"}), (2.0**28, {"same", "changed"})])
def test_the_fused_optimiser_skips_the_steps_that_the_loss_scaler_skips(tmp_path, monkeypatch, scale, steps):
    found = []
    for _ in range(2):
        task, precision = tiny_task(warmup_epochs=0), half(scale)
        fit(task, tmp_path, watch := Watch(), count=64, plugins=precision, gradient_clip_val=0.1)
        assert set(watch.steps) == steps
        assert precision.scaler.get_scale() == scale / 2 ** watch.steps.count("same")
        found.append([*task.network.parameters(), torch.tensor(watch.steps.count("same"))])
        monkeypatch.setattr(Task, "configure_gradient_clipping", LightningModule.configure_gradient_clipping)
    assert all(map(torch.equal, *found))


def test_with_a_loss_scaler_a_gradient_that_never_is_finite_ends_the_run(tmp_path):
    task = tiny_task()
    task.network.blocks[0].mlp.act = Broken()
    said = "step 3 is skipped.*'blocks.0.mlp.act'"
    with pytest.warns(UserWarning, match=said), pytest.raises(UserError, match="in 2 steps"):
        fit(task, tmp_path, plugins=half(8.0), guard=NonFiniteGuard(stop_after=2))


@pytest.mark.parametrize("given", [0, 1.5])
def test_stop_after_is_a_number_of_steps(given):
    with pytest.raises(UserError, match="stop_after"):
        NonFiniteGuard(stop_after=given)


@pytest.mark.slow
def test_a_bad_batch_of_one_rank_skips_the_step_of_all(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.callbacks.bad_rank", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    for here, there in zip(first, second, strict=True):
        for name in ("skipped", "weights", "error", "finite"):
            assert here[name] == there[name]
        assert here["finite"]
    assert [found["skipped"] for found in first] == [1, 1, 2]
    for found, step in zip(first, (1, 0, 0), strict=True):
        (said,) = found["warnings"]
        assert said.startswith(f"step {step} is skipped")
        assert "On rank 1: The first is the output of layer 'conv1.0' (Conv2d)" in said
    assert "1 of 4 samples: '21.png'" in first[0]["warnings"][0]
    assert "in 2 steps in a row" in first[2]["error"]
