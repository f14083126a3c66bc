"""Files are read if they are regular ones: a pipe or a device may have no end."""

import os
import socket

import pytest
import torch
import yaml

import linvit
from linvit import UserError
from linvit.data.detection import DetectionData
from linvit.evaluation.model import read_model
from linvit.evaluation.sets import real_labels
from linvit.experiments.compare.experiment import SweepRun
from linvit.io.files import LOCK, lock
from linvit.io.reading import check_regular, read_regular, read_text
from linvit.runs import result, yaml_text
from linvit.runs.folder import RunFolder
from linvit.weights import torch_file
from linvit.weights.read import read

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes with names, and devices, are of Unix")
SPECIAL = ("pipe", "device", "socket", "link")


def make(path, kind):
    """Something at a path that is no regular file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        target = path.with_name(f"{path.name}.target")
        os.mkfifo(target)
        path.symlink_to(target)
    else:
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(os.path.relpath(path))  # the name of a socket is short
    return path


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_read(tmp_path, kind):
    path = make(tmp_path / "file", kind)
    with pytest.raises(OSError, match="not a regular file"):
        read_regular(path)
    with pytest.raises(OSError, match="not a regular file"):
        check_regular(path)


def test_of_regular_files_at_most_so_many_bytes_are_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc\xc3\xa9")
    assert (read_regular(path, 5), read_text(str(path))) == (b"abc\xc3\xa9", "abcé")
    with pytest.raises(OSError, match="5 bytes are more than 4"):
        read_regular(path, 4)
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")
    os.truncate(path, 2**42)  # of which nothing is on the disk
    with pytest.raises(OSError, match="bytes are more than"):
        read_regular(path)


@pytest.mark.parametrize("kind", SPECIAL)
def test_no_file_of_a_run_or_of_data_is_waited_for(tmp_path, kind):
    def special(name):
        return make(tmp_path / name, kind)

    refused = {
        "config.yaml": lambda path: RunFolder(path.parent).config,
        "hparams.yaml": lambda path: RunFolder(path.parent).hparams,
        "result.json": result.read,
        "x.safetensors": linvit.load,
        "y.safetensors": read,
        "x.ckpt": linvit.load,
        "x.pth": torch_file.load,
        "x.pt2": lambda path: read_model(str(path), torch.device("cpu")),
        "real.json": lambda path: real_labels(path, None, 3),
        "names.txt": lambda path: DetectionData("scenes", class_names=str(path)).class_names,
        "options.yaml": lambda path: yaml_text.mapping(path),
    }
    for name, call in refused.items():
        with pytest.raises(UserError, match=r"regular|there is no|is not a|does not exist"):
            call(special(f"run/version_0/{name}"))
    with pytest.raises(OSError, match="not a regular file"):
        lock(special(f"locked/{LOCK}").parent)
    run = SweepRun(tmp_path / "one", "a", 0)
    special("one/outcome.json")
    assert run.state == "waiting"


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_run_whose_record_is_a_pipe_is_not_recorded(tmp_path, kind):
    folder = tmp_path / "run" / "version_0"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"trainer": {"max_time": "00:00:01:00"}}), encoding="utf-8")
    (folder / "metrics.csv").write_text("step,val/score,epoch\n9,0.5,0\n", encoding="utf-8")
    make(folder / "result.json", kind)
    assert not RunFolder(folder).complete
