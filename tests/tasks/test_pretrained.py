"""`pretrained:` of a task: loaded when the task is made, on record in its checkpoints, not needed by them."""

import pytest
import torch

import linvit
from linvit.tasks import ClassificationTask
from tests.helpers import perturb
from tests.training import fit, tiny_task


@pytest.fixture
def first(tmp_path):
    """A file of weights and the backbone that it is of."""
    backbone = perturb(tiny_task().network)
    torch.save(backbone.state_dict(), tmp_path / "first.pth")
    return tmp_path / "first.pth", backbone


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("options", [{}, {"min_fraction": 0.5}, {"ema": None}], ids=str)
def test_the_backbone_starts_from_it(first, options):
    path, backbone = first
    pretrained = {"source": str(path), **options} if options else str(path)
    assert not same(tiny_task().network, backbone)
    task = tiny_task(pretrained=pretrained)
    assert same(task.network, backbone)
    assert task.hparams["pretrained"] == pretrained


def test_options_reach_the_loader(first):
    path, _ = first
    with pytest.raises(linvit.UserError, match="less than min_fraction = 100%"):
        tiny_task(pretrained={"source": str(path), "min_fraction": 1.0}, backbone={"name": "deit_tiny", "depth": 2})
    with pytest.raises(linvit.UserError, match="holds no averaged weights"):
        tiny_task(pretrained={"source": str(path), "ema": True})


def test_from_the_moving_average_of_a_run(tmp_path):
    run = tiny_task(ema_decay=0.9, lr=1e-2, warmup_epochs=0)
    fit(run, tmp_path).save_checkpoint(tmp_path / "x.ckpt")
    assert not same(run.ema.network, run.network), "this shows nothing"
    for ema, network in ((True, run.ema.network), (False, run.network), (None, run.network)):
        task = tiny_task(pretrained={"source": str(tmp_path / "x.ckpt"), "ema": ema, "min_fraction": 1.0})
        assert same(task.network, network)


@pytest.mark.parametrize("pretrained", [{}, {"source": 3}, {"source": None}, {"min_fraction": 1}], ids=str)
def test_a_mapping_without_a_source(pretrained):
    with pytest.raises(linvit.UserError, match="names no source"):
        tiny_task(pretrained=pretrained)


def test_a_checkpoint_opens_without_it(first, tmp_path):
    path, _ = first
    task = tiny_task(pretrained=str(path))
    fit(task, tmp_path).save_checkpoint(tmp_path / "x.ckpt")
    path.unlink()
    twin = ClassificationTask.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True)
    assert same(twin, task)
    assert dict(twin.hparams) == dict(task.hparams)


def test_a_checkpoint_from_before_there_was_such_an_argument(tmp_path):
    task = tiny_task()
    fit(task, tmp_path).save_checkpoint(tmp_path / "x.ckpt")
    content = torch.load(tmp_path / "x.ckpt", weights_only=True)
    del content["hyper_parameters"]["pretrained"]
    torch.save(content, tmp_path / "x.ckpt")
    assert same(ClassificationTask.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=True), task)
