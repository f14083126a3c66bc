"""Whole runs that stop being finite: what they say, how they end, and what they leave."""

import math

import pytest
import torch
from lightning.pytorch import Callback

from linvit.data import ClassificationData
from tests.cli.runs import QUICKSTART, linvit, tiny

HERE = __name__


class NanPixel(ClassificationData):
    """Training images from row 7 on have a pixel that is NaN, which 8-bit files cannot hold."""

    def finish(self, batch):
        super().finish(batch)
        if self.trainer is not None and self.trainer.training:
            batch["image"][batch["index"] >= 7, 1, 2, 2] = math.nan


class NanWeight(Callback):
    """A weight turns NaN in step 12, of the second epoch."""

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if trainer.global_step == 12:
            task.network.blocks[0].mlp.fc1.weight.data[0, 0] = math.nan


def fit(folder, *arguments, **options):
    return linvit("fit", f"--config={QUICKSTART}", *tiny(**options), *arguments, cwd=folder)


def weights(path):
    return torch.load(path, weights_only=True)["state_dict"]


def assert_finite(folder, expected):
    found = {path.name: weights(path) for path in folder.rglob("*.ckpt")}
    assert expected <= found.keys()
    for name, state in found.items():
        assert all(value.isfinite().all() for value in state.values()), name


@pytest.mark.parametrize(
    ("arguments", "options", "said", "kept"),
    [
        (
            ["--non_finite.stop_after=3"],
            {"model__lr": 1e6, "model__warmup_epochs": 0},
            ["in 3 steps in a row", "layer 'blocks.0."],
            set(),
        ),
        pytest.param(
            [f"--trainer.callbacks+={HERE}.NanWeight"],
            {"model__ema_decay": 0.9},
            [
                "step 12",
                "'blocks.0.mlp.fc1' (Linear), for 16 of 16 samples",
                "weights 'network.blocks.0.mlp.fc1.weight'",
            ],
            {"best.ckpt", "last.ckpt"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [f"--data={HERE}.NanPixel", "--non_finite.stop_after=4"],
            {},
            ["step 3", "in 4 steps in a row", "layer 'patch_embed.proj' (Conv2d)", "the data itself is not finite"],
            set(),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["lr", "weight", "pixel"],
)
def test_a_run_that_is_not_finite_fails_and_says_why(tmp_path, arguments, options, said, kept):
    with pytest.warns(UserWarning, match="is skipped: its loss or gradient is not finite"):
        done = fit(tmp_path, *arguments, **options)
    assert done.code == 2
    (line,) = [line for line in done.err.splitlines() if "linvit: error" in line]
    for part in ["training stopped", *said, "--model.lr", "--trainer.gradient_clip_val=1"]:
        assert part in line
    assert "Traceback" not in done.err
    assert_finite(tmp_path, kept)


@pytest.mark.parametrize("verb", ["fit", "test"])
def test_a_checkpoint_that_is_not_finite_is_refused_before_the_start(run, tmp_path, verb):
    checkpoint = torch.load(run.checkpoint("last"), weights_only=True)
    checkpoint["state_dict"]["network.head.weight"][1, 1] = math.nan
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    done = linvit(verb, f"--config={run.config}", f"--ckpt_path={tmp_path / 'bad.ckpt'}", cwd=tmp_path)
    assert done.code == 2
    assert (
        f"bad.ckpt' is not finite: 'network.head.weight'. Use an earlier one; others may lie in {tmp_path}" in done.err
    )
