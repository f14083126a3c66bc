"""A malicious file runs nothing, whichever way it comes in."""

import sys

import pytest
import torch

import linvit
from linvit.cli import main
from linvit.runs.checkpoint import read_checkpoint
from tests.cli.runs import QUICKSTART, tiny
from tests.cli.runs import linvit as command
from tests.training import tiny_task
from tests.weights import bombs

SPEC = "{name: deit_tiny, depth: 1, embed_dim: 24, patch_size: 4}"


def load(path, folder):
    linvit.load_pretrained(tiny_task().network, path)


def import_weights(path, folder):
    done = main(["import-weights", str(path), "--backbone", SPEC, "-o", str(folder / "out.safetensors")])
    assert done in (0, 2)
    if done:
        raise linvit.UserError("")


def pretrained(path, folder):
    tiny_task(pretrained=str(path))


def ckpt_path(path, folder):
    read_checkpoint(path)


DOORS = [load, import_weights, pretrained, ckpt_path]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_nothing_runs(tmp_path, door):
    """One bomb for each door: they share a reader, and tests/weights/test_torch_file.py tries all bombs on it."""
    path, mark = tmp_path / "x.pth", tmp_path / "mark"
    bombs.as_zip(path, bombs.pickled(bombs.BOMBS["newobj"](str(mark))))
    with pytest.raises(linvit.UserError):
        door(path, tmp_path)
    assert not mark.exists()


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return bombs.New, (self.mark,)


def armed(path, mark, old):
    """A file of good weights with a bomb beside them."""
    state = tiny_task().network.state_dict()
    content = {"model": state, "config": Bomb(mark), "optimizer": {"state": [Bomb(mark)]}}
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    return state


@pytest.mark.parametrize("door", [load, import_weights, pretrained], ids=lambda door: door.__name__)
@pytest.mark.parametrize("old", [False, True], ids=["zip", "stream"])
def test_good_weights_are_taken_and_the_rest_is_left(tmp_path, door, old):
    path, mark = tmp_path / "x.pth", tmp_path / "mark"
    armed(path, mark, old)
    door(path, tmp_path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the bomb is a dud, so this shows nothing"


@pytest.mark.parametrize("verb", ["fit", "predict"])
def test_the_command_line_runs_nothing(tmp_path, verb):
    path, mark = tmp_path / "x.ckpt", tmp_path / "mark"
    content = {"hyper_parameters": {"lr": Bomb(mark)}, "state_dict": {"w": Bomb(mark)}, "global_step": 1}
    torch.save(content, path)
    done = command(verb, f"--config={QUICKSTART}", *tiny(), f"--ckpt_path={path}", cwd=tmp_path)
    assert done.code == 2
    assert not mark.exists()
    armed(path, mark, old=False)
    done = command(verb, f"--config={QUICKSTART}", *tiny(), f"--model.pretrained={path}", cwd=tmp_path)
    assert done.code == 2  # the weights of another model
    assert "nothing was changed" in done.err
    assert not mark.exists()


def test_the_command_line_imports_no_class_that_it_does_not_name(run, tmp_path, monkeypatch):
    module, name = tmp_path / "module_of_a_run.py", "module_of_a_run:Mine"
    module.write_text("from linvit.backbones.deit import deit_nano as Mine\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    content = torch.load(run.checkpoint("last"), weights_only=True)
    content["hyper_parameters"]["backbone"] = {"name": name, "depth": 1}
    torch.save(content, tmp_path / "x.ckpt")
    arguments = ("validate", f"--config={run.config}", f"--ckpt_path={tmp_path / 'x.ckpt'}")
    done = command(*arguments, cwd=tmp_path)
    assert done.code == 2
    assert f"the backbone class '{name}' is not registered" in done.err
    assert "module_of_a_run" not in sys.modules
    done = command(*arguments, f"--model.backbone={name}", cwd=tmp_path)
    assert done.code == 0, done.err
    del sys.modules["module_of_a_run"]
