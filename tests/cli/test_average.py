"""A run with a moving average: what it keeps, and what going on leaves alone."""

import re

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.runs import events, flags, linvit, train


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A run of two epochs with a moving average."""
    return train(tmp_path_factory.mktemp("averaged"), "--model.ema_decay=0.5")


def kept(path):
    return torch.load(path, weights_only=True)


def test_the_best_of_each_kind_is_kept(averaged):
    curves = events(averaged.folder)
    for name, tag in (("best", "val/score"), ("best_ema", "val/ema_score")):
        score = dict(curves[tag])
        assert score[kept(averaged.checkpoint(name))["global_step"] - 1] == max(score.values())
        assert f"best {tag}  {max(score.values()):.4f}" in averaged.done.log
    assert {"val/ema_top1", "val/ema_top5", "val/ema_loss", "val/ema_score"} <= curves.keys()


def test_a_worse_epoch_after_going_on_does_not_replace_it(averaged, tmp_path_factory):
    """The scores so far are in the checkpoint, of the weights and of their average."""
    run = train(tmp_path_factory.mktemp("worse"), "--model.ema_decay=0.5")
    for name in ("best", "best_ema"):
        assert run.checkpoint(name).exists()
    content = kept(run.checkpoint("last"))
    for state in content["callbacks"].values():  # as if a score that cannot be beaten had been reached
        if "val/score" in state:
            state |= dict.fromkeys(state, 1.5)
    torch.save(content, run.checkpoint("last"))
    before = {name: run.checkpoint(name).read_bytes() for name in ("best", "best_ema")}
    done = run.then("fit", "--trainer.max_epochs=3", checkpoint="last")
    assert done.code == 0, done.err
    assert kept(run.checkpoint("last"))["global_step"] == 30
    assert before == {name: run.checkpoint(name).read_bytes() for name in ("best", "best_ema")}


def test_test_scores_both_and_predict_takes_the_one_asked_for(averaged):
    done = averaged.then("test", checkpoint="best_ema")
    assert done.code == 0, done.err
    assert len(re.findall(r"^  test/(?:ema_)?top1 ", done.out, re.M)) == 2
    header = (averaged.folder / "test_classes.csv").read_text().splitlines()[0]
    assert header == "class,images,top1,ema_top1"
    found = []
    for weights in ("raw", "ema"):
        done = averaged.then("predict", f"--model.predict_with={weights}", checkpoint="best_ema")
        assert done.code == 0, done.err
        assert "is ignored" not in done.log
        found.append((averaged.folder / "predictions_digits.csv").read_text())
    assert found[0] != found[1]


def test_a_runs_folder_stands_for_the_best_of_the_weights_that_predict(averaged):
    arguments = [f"--ckpt_path={averaged.folder}", "--model.predict_with=ema"]
    done = linvit("predict", f"--config={averaged.config}", *arguments, cwd=averaged.root)
    assert done.code == 0, done.err
    assert "its checkpoints/best_ema.ckpt" in done.log


def test_no_verb_misses_what_kept_the_average(averaged, recwarn):
    done = averaged.then("validate", *flags(trainer__limit_val_batches=1, trainer__limit_test_batches=1))
    assert done.code == 0, done.err
    assert not [str(warning.message) for warning in recwarn if "callbacks" in str(warning.message)]


def test_the_average_becomes_a_file_of_weights(averaged, tmp_path):
    source, output = averaged.checkpoint("best_ema"), tmp_path / "x.safetensors"
    backbone = "{name: deit_nano, depth: 1, attention: focused}"
    done = linvit("import-weights", source, "--ema", "--backbone", backbone, "-o", output, cwd=tmp_path)
    assert done.code == 0, done.err
    saved, written = kept(source)["state_dict"], load_file(output)
    assert all(torch.equal(tensor, saved[f"ema.network.{name}"]) for name, tensor in written.items())
    assert not all(torch.equal(tensor, saved[f"network.{name}"]) for name, tensor in written.items())


def test_how_a_model_runs_is_not_the_checkpoints_to_decide(averaged, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled.append(self))
    short = flags(trainer__limit_test_batches=1)
    done = averaged.then("test", "--model.compile=true", "--model.lr=3", *short)
    assert done.code == 0, done.err
    assert len(compiled) == 2  # the weights and their average
    assert "--model.lr=3" in done.log
    assert "--model.compile" not in done.log
