"""Repositories of the hub, with a hub that is not there."""

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

import linvit
from linvit.weights.read import HUB_FILES, read


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """What is asked of the hub, which has the files that one puts in `there`."""
    asked, there = [], {"pytorch_model.bin"}
    torch.save({"w": torch.ones(2)}, tmp_path / "weights.bin")

    def fetch(repository, file, revision=None):
        asked.append((repository, file, revision))
        if file not in there:
            raise EntryNotFoundError.__new__(EntryNotFoundError)
        return str(tmp_path / "weights.bin")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.chdir(tmp_path)
    return asked, there


@pytest.mark.parametrize("source", ["hf-hub:timm/deit_tiny.fb_in1k", "timm/deit_tiny.fb_in1k"])
def test_the_first_file_that_is_there(calls, source):
    assert torch.equal(read(source).state["w"], torch.ones(2))
    assert calls[0] == [("timm/deit_tiny.fb_in1k", file, None) for file in HUB_FILES[:3]]


def test_a_named_file_and_a_revision(calls):
    calls[1].add("a/b.pth")
    read("hf-hub:owner/name/a/b.pth@v1")
    assert calls[0] == [("owner/name", "a/b.pth", "v1")]


def test_a_folder_that_is_here_is_no_repository(calls, tmp_path):
    (tmp_path / "owner").mkdir()
    with pytest.raises(linvit.UserError, match="'owner/name' is not a file of weights"):
        read("owner/name")
    assert calls[0] == []


@pytest.mark.parametrize("source", ["owner/name.pth", "deit_tiny", "/abs/name"])
def test_a_path_is_no_repository(calls, source):
    with pytest.raises(linvit.UserError, match="is not a file of weights"):
        read(source)
    assert calls[0] == []


@pytest.mark.parametrize(
    "error", [OSError("no route"), ValueError("bad name"), LocalEntryNotFoundError("offline")], ids=repr
)
def test_a_hub_that_does_not_answer(monkeypatch, error):
    def fetch(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    with pytest.raises(linvit.UserError) as raised:
        read("hf-hub:owner/name")
    assert f"no weights from 'hf-hub:owner/name': {error}" in str(raised.value)
    assert "download it and give its path" in str(raised.value)
