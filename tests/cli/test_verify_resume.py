"""`linvit verify-resume`."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

import linvit
from linvit.cli import verify_resume
from linvit.cli.verify_resume import differences, main, split
from tests.plugin.distributions import python


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--interruptions=12"], "1 to N - 1 times; got --steps=12 and --interruptions=12"),
        (["--interruptions=0"], "got --steps=12 and --interruptions=0"),
        (["--ckpt_path=x.ckpt"], "leave out --ckpt_path"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(linvit.UserError, match=message):
        main(["--config=quickstart", *arguments])


def test_what_fit_says_of_a_wrong_option_is_shown(monkeypatch):
    failed = subprocess.CompletedProcess([], 2, "", "linvit: error: no such option")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(linvit.UserError, match="exit code 2; its last words:\nlinvit: error: no such option"):
        main(["--config=quickstart", "--data.batchsize=3"])


def test_options_of_the_command_line_win_over_those_of_the_short_run():
    given = ["-c", "a.yaml", "--trainer.max_epochs=3", "--config", "b.yaml", "--config=c.yaml", "--x", "y"]
    configs = ["--config", "a.yaml", "--config", "b.yaml", "--config", "c.yaml"]
    assert split(given) == (configs, ["--trainer.max_epochs=3", "--x", "y"])


def test_differences_are_named_with_their_size():
    one = {"weight": torch.tensor([1.0, 2.0]), "steps": [1, {"rate": 0.5}], "same": torch.ones(2)}
    other = {"weight": torch.tensor([1.0, 2.5]), "steps": [1, {"rate": 0.25}], "same": torch.ones(2)}
    assert differences({"state": (one, other)}) == [
        "state/weight: differs by 0.5 at most, of 2",
        "state/steps/1/rate: 0.5 and 0.25",
    ]
    assert differences({"state": (one, one)}) == []


@pytest.mark.parametrize(("weight", "cause"), [(0.0, "is not in the checkpoint"), (0.1, "two runs without an int")])
def test_the_cause_is_found_by_a_third_run(weight, cause, monkeypatch, tmp_path):
    whole, again = (SimpleNamespace(content={"state_dict": {"w": torch.tensor(w)}}) for w in (0.0, weight))
    again.train = lambda steps: None
    monkeypatch.setattr(verify_resume, "ShortRun", lambda folder, options: again)
    assert cause in verify_resume._cause(whole, tmp_path, [], 2)


HIDDEN = """
from lightning.pytorch import Callback


class Hidden(Callback):
    "Keeps a number that no checkpoint has."

    def __init__(self):
        self.batches = 0

    def on_train_batch_start(self, trainer, module, *args):
        self.batches += 1
        module.network.head.bias.data += self.batches / 1000
"""


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True])
def test_the_verdict_of_real_runs(tmp_path, hidden):
    (tmp_path / "mine.py").write_text(HIDDEN)
    config = {"trainer": {"callbacks+": [{"class_path": "mine.Hidden"}]}} if hidden else {}
    (tmp_path / "mine.json").write_text(json.dumps(config))
    done = python(
        "-m", "linvit", "verify-resume", "--config=quickstart", f"--config={tmp_path}/mine.json", cwd=tmp_path
    )
    assert done.returncode == int(hidden), done.stderr
    if hidden:
        assert "NOT equal after 12 steps" in done.stdout
        assert "something that training reads is not in the checkpoint" in " ".join(done.stdout.split())
    else:
        assert "bit-equal after 12 steps, interrupted after 5 and 8" in done.stdout
        for name in ("best.ckpt", "best_ema.ckpt", "last.ckpt", "metrics.csv", "events", "val_classes.csv"):
            assert name in done.stdout


@pytest.mark.slow
def test_segmentation_is_bit_equal(tmp_path):
    small = ["--data.img_size=32", "--data.batch_size=2", "--trainer.accelerator=cpu", "--trainer.limit_val_batches=1"]
    options = ["--config=segmentation_quickstart", "--steps=6", "--interruptions=1", *small]
    done = python("-m", "linvit", "verify-resume", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bit-equal after 6 steps" in done.stdout
