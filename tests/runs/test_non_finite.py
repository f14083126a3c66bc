"""Whole runs that stop being finite: what they say, how they end, and what they leave."""

import math

import pytest
import torch

from tests.cli.runs import QUICKSTART, linvit, tiny


def test_a_run_that_is_not_finite_fails_and_says_why(tmp_path):
    options = tiny(model__lr=1e6, model__warmup_epochs=0)
    with pytest.warns(UserWarning, match="is skipped: its loss or gradient is not finite"):
        done = linvit("fit", f"--config={QUICKSTART}", *options, "--non_finite.stop_after=3", cwd=tmp_path)
    assert done.code == 2
    (line,) = [line for line in done.err.splitlines() if "linvit: error" in line]
    for part in ("in 3 steps in a row", "layer 'blocks.0.", "--model.lr", "--trainer.gradient_clip_val=1"):
        assert part in line
    assert "Traceback" not in done.err
    for path in tmp_path.rglob("*.ckpt"):
        assert all(value.isfinite().all() for value in torch.load(path, weights_only=True)["state_dict"].values())


def test_a_checkpoint_that_is_not_finite_is_refused_before_the_start(run, tmp_path):
    checkpoint = torch.load(run.checkpoint("last"), weights_only=True)
    checkpoint["state_dict"]["network.head.weight"][1, 1] = math.nan
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    done = linvit("fit", f"--config={run.config}", f"--ckpt_path={tmp_path / 'bad.ckpt'}", cwd=tmp_path)
    assert done.code == 2
    assert (
        f"bad.ckpt' has non-finite weights: 'network.head.weight'. Use an earlier one; look in {tmp_path}" in done.err
    )
