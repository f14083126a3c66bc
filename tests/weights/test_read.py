"""From any wrapper to one flat state dict, and what is said of files that hold none."""

import argparse
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import linvit
from linvit.weights.read import read

GOOD, WORSE = {"w": torch.ones(2)}, {"w": torch.zeros(2)}


def wrapped(prefix, state=GOOD):
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("content", "taken"),
    [
        (GOOD, ""),
        ({"model": GOOD}, "model"),
        ({"state_dict": GOOD}, "state_dict"),
        ({"state_dict_ema": GOOD, "state_dict": WORSE}, "state_dict_ema"),
        ({"model_ema": GOOD, "state_dict": WORSE}, "model_ema"),
        ({"model": GOOD, "state_dict_ema": WORSE}, "model"),
        ({"model": {"state_dict": GOOD}}, "model.state_dict"),
        ({"state_dict": {"model": GOOD}}, "state_dict.model"),
        ({"model": GOOD, "epoch": torch.tensor(3)}, "model"),
        (wrapped("module."), ""),
        (wrapped("_orig_mod."), ""),
        (wrapped("module._orig_mod."), ""),
        (wrapped("_orig_mod.module."), ""),
        (wrapped("module.module."), ""),
        (wrapped("backbone."), ""),
        (wrapped("network."), ""),
        ({**wrapped("backbone._orig_mod."), "decode_head.w": torch.zeros(2)}, ""),
        ({"state_dict": wrapped("module.backbone.module.")}, "state_dict"),
        ({**GOOD, "epoch": 3, "name": "x"}, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("saved", [False, True], ids=["dict", "file"])
def test_wrappers_are_taken_off(tmp_path, content, taken, saved):
    if saved:
        torch.save(content, tmp_path / "x.pth")
    weights = read(tmp_path / "x.pth" if saved else content)
    assert list(weights.state) == ["w"]
    assert torch.equal(weights.state["w"], GOOD["w"])
    assert weights.key == taken


def test_a_compiled_part_of_a_model():
    assert list(read({"stages.0._orig_mod.w": torch.ones(1)}).state) == ["stages.0.w"]


def test_blocks_of_a_model_may_be_called_as_the_network_of_a_task():
    """timm's VOLO."""
    names = ["patch_embed.conv.weight", "network.0.0.norm1.weight", "head.weight"]
    assert list(read(dict.fromkeys(names, torch.ones(1))).state) == names
    assert list(read({f"network.{name}": torch.ones(1) for name in names}).state) == names


@pytest.mark.parametrize(("ema", "taken"), [(None, "model"), (True, "state_dict_ema"), (False, "model")])
def test_averaged_weights_are_a_choice(ema, taken):
    content = {"model": WORSE, "state_dict_ema": GOOD, "epoch": 1}
    weights = read(content, ema)
    assert weights.key == taken
    assert set(weights.other_keys) == content.keys() - {taken}
    assert torch.equal(weights.state["w"], content[taken]["w"])


@pytest.mark.parametrize("path", ["", "state_dict."], ids=["state dict", "checkpoint"])
@pytest.mark.parametrize("ema", [None, True, False])
def test_a_task_s_weights_and_their_average_lie_side_by_side(path, ema):
    """Averaged weights are taken only if asked for, as when the task predicts."""
    task = {**wrapped("network._orig_mod.", WORSE), **wrapped("ema.network._orig_mod."), "metrics.n": torch.ones(1)}
    weights = read({"epoch": 1, "state_dict": task} if path else task, ema)
    taken, left = ("ema.network", "network") if ema else ("network", "ema.network")
    assert (weights.key, weights.other_keys[0]) == (f"{path}{taken}", left)
    assert list(weights.state) == ["w"]
    assert torch.equal(weights.state["w"], (GOOD if ema else WORSE)["w"])


@pytest.mark.parametrize(
    ("content", "ema", "message"),
    [
        (
            {"model": GOOD},
            True,
            "holds no averaged weights (state_dict_ema, model_ema or ema.network.*): it holds model; set ema: false",
        ),
        ({"state_dict": wrapped("backbone.")}, True, "holds no averaged weights"),
        (GOOD, True, "holds no averaged weights"),
        ({"state_dict_ema": GOOD}, False, "holds no weights: it holds state_dict_ema"),
        ({"epoch": 3}, None, "holds no weights: it holds epoch"),
        ({}, None, "holds no weights: it holds nothing"),
        ({"model": {}}, None, "holds no weights"),
    ],
    ids=str,
)
def test_what_is_no_state_dict(content, ema, message):
    with pytest.raises(linvit.UserError) as error:
        read(content, ema)
    assert message in str(error.value)


def test_a_dict_that_contains_itself():
    content = {"epoch": 3}
    content["model"] = content
    with pytest.raises(linvit.UserError, match="holds no weights"):
        read(content)


@pytest.mark.parametrize("content", [nn.Linear(2, 2), [1], argparse.Namespace()], ids=type)
def test_a_whole_object_is_no_state_dict(tmp_path, content):
    torch.save(content, tmp_path / "x.pth")
    with pytest.raises(linvit.UserError, match="holds no weights"):
        read(tmp_path / "x.pth")
    torch.save({"model": content}, tmp_path / "x.pth")
    with pytest.raises(linvit.UserError, match="holds no weights"):
        read(tmp_path / "x.pth")


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(3, 3).to_sparse(), torch.ones(3, device="meta")],
    ids=["sparse", "meta"],
)
@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
def test_a_tensor_that_is_not_what_it_seems(tmp_path, tensor):
    torch.save({"w": tensor, "v": torch.ones(2), "x": Path()}, tmp_path / "x.pth")
    with pytest.raises(linvit.UserError, match=r"'w' of .* is not a plain tensor"):
        read(tmp_path / "x.pth")


@pytest.mark.parametrize("old", [False, True])
def test_files_of_every_kind(tmp_path, old):
    state = {"w": torch.randn(3)}
    for name in ("x.pth", "x.pt", "x.bin", "x.ckpt", "x.tar", "x.weights"):
        torch.save({"model": state}, tmp_path / name, _use_new_zipfile_serialization=not old)
        assert torch.equal(read(tmp_path / name).state["w"], state["w"])
        assert torch.equal(read(str(tmp_path / name)).state["w"], state["w"])
    save_file(state, tmp_path / "x.safetensors")
    weights = read(tmp_path / "x.safetensors")
    assert torch.equal(weights.state["w"], state["w"])
    assert weights.img_size == (1, 1)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".ckpt"])
@pytest.mark.parametrize("content", [b"", b"<!DOCTYPE html>", bytes(1000), b"PK\x03\x04", b"\x80\x02}."], ids=repr)
def test_a_file_of_another_kind(tmp_path, suffix, content):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    with pytest.raises(linvit.UserError) as error:
        read(path)
    assert f"'{path}' is incomplete or not a checkpoint ({len(content)} bytes)" in str(error.value)


def test_a_missing_file_and_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("deit_tiny.pth", "deit_small.pth", "other.safetensors", "readme.txt"):
        (tmp_path / name).touch()
    with pytest.raises(linvit.UserError) as error:
        read("deit_tinny.pth")
    assert "'deit_tinny.pth' is not a file of weights. In '.' there are: deit_tiny.pth" in str(error.value)
    assert "readme" not in str(error.value)
    with pytest.raises(linvit.UserError, match=r"In '.*' there are: deit_tiny.pth, deit_small.pth"):
        read(tmp_path)
    with pytest.raises(linvit.UserError, match=r"'nowhere/x.pth' is not a file of weights\. A source is a file"):
        read("nowhere/x.pth")
