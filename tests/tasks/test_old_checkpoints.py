"""Checkpoints of before: weights were `backbone.*`, and some options had other names."""

import pytest
import torch

from linvit import UserError
from linvit.tasks import ClassificationTask
from linvit.tasks.old_checkpoints import RENAMED_OPTIONS
from linvit.weights.load import load_pretrained
from tests.cli.runs import QUICKSTART, flags, tiny
from tests.cli.runs import linvit as command
from tests.training import SIDE, batches, fit, tiny_task, trainer

OPTIONS = {"ema_decay": 0.5, "lr": 1e-2, "warmup_epochs": 0, "mixup_prob": 0.25, "lr_base_batch_size": 16}


def age(path):
    """Writes a checkpoint as it was before."""
    content = torch.load(path, weights_only=True)
    before = {new: old for old, new in RENAMED_OPTIONS.items()}
    content["hyper_parameters"] = {before.get(name, name): x for name, x in content["hyper_parameters"].items()}
    content["state_dict"] = {
        f"backbone.{name.removeprefix('network.')}" if name.startswith("network.") else name: tensor
        for name, tensor in content["state_dict"].items()
    }
    torch.save(content, path)


@pytest.fixture
def old(tmp_path):
    """A task that was trained for an epoch, and its checkpoint."""
    task = tiny_task(**OPTIONS)
    fit(task, tmp_path).save_checkpoint(tmp_path / "old.ckpt")
    age(tmp_path / "old.ckpt")
    names = torch.load(tmp_path / "old.ckpt", weights_only=True)
    assert {"mix_prob", "lr_batch", "lr_lag"} <= names["hyper_parameters"].keys()
    assert {"backbone.head.weight", "ema.network.head.weight"} <= names["state_dict"].keys()
    return task, tmp_path / "old.ckpt"


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_it_is_loaded_as_a_task(old):
    task, path = old
    again = ClassificationTask.load_from_checkpoint(path, weights_only=True)
    assert same(again, task)
    assert dict(again.hparams) == dict(task.hparams)
    assert again.ema.updates == 2
    assert again.mixup.prob == 0.25


def test_it_is_resumed_and_validated(old, tmp_path):
    task, path = old
    again = tiny_task(**OPTIONS)
    runner = trainer(tmp_path, max_epochs=2)
    runner.fit(again, batches(16), ckpt_path=path, weights_only=True)
    assert runner.global_step == 4
    (found,) = trainer(tmp_path).validate(tiny_task(**OPTIONS), batches(16), path, verbose=False, weights_only=True)
    (expected,) = trainer(tmp_path).validate(task, batches(16), verbose=False)
    assert found == expected


@pytest.mark.parametrize("ema", [False, True])
def test_its_weights_start_another(old, ema):
    task, path = old
    backbone = tiny_task().network
    load_pretrained(backbone, path, ema=ema, min_fraction=1.0)
    assert same(backbone, task.ema.network if ema else task.network)


def test_the_command_line_scores_and_resumes_it(tmp_path):
    short = flags(trainer__max_epochs=1, trainer__limit_train_batches=2, trainer__limit_test_batches=1)
    assert command("fit", f"--config={QUICKSTART}", *tiny(), *short, cwd=tmp_path).code == 0
    last = tmp_path / "checkpoints" / "quickstart" / "version_0" / "checkpoints" / "last.ckpt"
    done = command("test", f"--config={QUICKSTART}", *tiny(), *short, f"--ckpt_path={last}", cwd=tmp_path)
    age(last)
    again = command("test", f"--config={QUICKSTART}", *tiny(), *short, f"--ckpt_path={last}", cwd=tmp_path)
    assert done.code == again.code == 0, again.err
    assert again.out == done.out
    further = [*tiny(), *short, f"--ckpt_path={last}", "--trainer.max_epochs=2"]
    done = command("fit", f"--config={QUICKSTART}", *further, cwd=tmp_path)
    assert done.code == 0, done.err
    assert torch.load(last, weights_only=True)["global_step"] == 4


@pytest.mark.parametrize("name", RENAMED_OPTIONS)
def test_an_old_option_is_refused_with_its_new_name(name, tmp_path):
    done = command("fit", f"--config={QUICKSTART}", f"--model.{name}=1", "--print_config", cwd=tmp_path)
    assert done.code == 2
    assert f"It is called '{RENAMED_OPTIONS[name]}' now" in done.err
    with pytest.raises(UserError, match=f"'{name}'.*is called '{RENAMED_OPTIONS[name]}' now"):
        tiny_task(**{name: 1}, img_size=SIDE)
