"""`linvit evaluate`: a run, its exported file and a model of timm on sets, and what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys

import datasets
import pytest
import timm
import torch
from PIL import Image

from linvit.evaluation.model import read_model
from tests.cli.runs import linvit
from tests.data.images import image_folder
from tests.digit_folders import count, digit_folder

ODD = ["1", "3", "5", "7", "9"]
QUICK = ["--num_workers", 0, "--output", "out"]


def records(folder):
    return {
        (each["set"], each["size"][0], each["corruption"], each["severity"]): each
        for each in json.loads((folder / "out" / "evaluation.json").read_text(encoding="utf-8"))
    }


def test_a_run_on_some_classes_and_at_another_size(run, tmp_path):
    digit_folder(tmp_path / "odd", ODD)
    done = linvit("evaluate", run.folder, "--sets", "a=odd", "--sizes", 32, 40, *QUICK, cwd=tmp_path)
    assert done.code == 0, done.err
    found = records(tmp_path)
    assert [*found] == [("clean", 32, None, None), ("clean", 40, None, None), ("a", 32, None, None)]
    own = found["a", 32, None, None]
    assert (own["images"], own["classes"], own["top1"]) == (40, 5, count(run, tmp_path / "odd", ODD) / 40)
    digit_folder(tmp_path / "all", ODD, 100)  # all test digits of these classes
    assert own["clean"] == pytest.approx(count(run, tmp_path / "all", ODD) / len([*(tmp_path / "all").rglob("*.png")]))
    record = json.loads((run.folder / "result.json").read_text(encoding="utf-8"))
    clean, larger = (found["clean", size, None, None]["top1"] for size in (32, 40))
    assert record["evaluation"] == {"clean": clean, "clean 40x40": larger, "a": own["top1"]}
    done = linvit("evaluate", run.checkpoint("last"), "--sets", "clean=odd", *QUICK[:2], "--output=last", cwd=tmp_path)
    assert done.code == 0, done.err  # of another checkpoint than the best, whose scores are those of the run
    assert json.loads((run.folder / "result.json").read_text(encoding="utf-8")) == record
    tested = float(re.search(r"test/top1 +(\S+)", run.then("test").out)[1])
    assert found["clean", 32, None, None]["top1"] == pytest.approx(tested)
    assert own["images_per_second"] > 0
    assert own["peak_memory"] > 0
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg") == 2  # reliability, resolution
    assert "| a | 32x32 | 40 | 5 of 10 |" in (tmp_path / "out" / "evaluation.md").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "evaluation.csv").read_text(encoding="utf-8").count("\n") == 4
    done = linvit("evaluate", run.folder, "--sets", "clean=all", *QUICK, cwd=tmp_path)
    assert done.code == 0, done.err
    again = json.loads((run.folder / "result.json").read_text(encoding="utf-8"))["evaluation"]
    assert again == record["evaluation"] | {"clean of all": own["clean"]}  # other images than the run's own


@pytest.mark.slow
def test_exported_files_score_what_the_run_scores(run, tmp_path):
    options = ["--sets", "clean=digits", "--output"]
    scores = []
    for name, more in (("x.onnx", []), ("pixels.onnx", ["--with_preprocessing"]), ("x.pt2", [])):
        assert linvit("export", run.folder, name, "--skip_latency", *more, cwd=tmp_path).code == 0
        done = linvit("evaluate", name, *options, "out", "--num_workers", 0, cwd=tmp_path)
        assert done.code == 0, done.err
        scores.append(records(tmp_path)["clean", 32, None, None])
    assert linvit("evaluate", run.folder, *QUICK, cwd=tmp_path).code == 0
    own = records(tmp_path)["clean", 32, None, None]
    for score in scores:
        assert (score["images"], score["top1"]) == (360, own["top1"])
        assert score["nll"] == pytest.approx(own["nll"], rel=1e-4)


def corrupted(folder, names):
    for name in names:
        for severity in range(1, 6):
            digit_folder(folder / name / str(severity), ["0", "1"], severity)


def test_corruptions_are_read_from_folders(run, tmp_path):
    """Those of which a severity is missing are left out, with a warning."""
    corrupted(tmp_path / "c", ["fog", "snow", "spatter"])
    shutil.rmtree(tmp_path / "c" / "snow" / "4")
    with pytest.warns(UserWarning, match=r"left out of c, since a severity of 1 to 5 is missing in 'c': .*snow"):
        done = linvit("evaluate", run.folder, "--sets", "c=c", *QUICK, cwd=tmp_path)
    assert done.code == 0, done.err
    found = records(tmp_path)
    assert [*found][1:] == [("c", 32, "fog", severity) for severity in range(1, 6)]
    for severity in range(1, 6):
        own = found["c", 32, "fog", severity]
        assert own["images"] == 2 * severity
        assert own["top1"] * own["images"] == count(run, tmp_path / "c" / "fog" / str(severity), ["0", "1"])
    assert re.search(r"of c by severity. 0\.\d+ is the mean error", " ".join(done.out.split()))
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/png") == 1


@pytest.mark.slow
def test_corruptions_are_the_same_on_two_ranks(run, tmp_path):
    corrupted(tmp_path / "c", ["fog"])
    found = []
    for devices, workers in ((1, 0), (2, 1)):
        arguments = ["evaluate", run.folder, "--sets", "c=c", "--devices", devices, "--num_workers", workers]
        command = [sys.executable, "-m", "linvit", *map(str, arguments), "--output", "out"]
        done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.append({key: (each["top1"], each["nll"], each["bins"]) for key, each in records(tmp_path).items()})
    assert len(found[0]) == 6
    assert found[0] == found[1]


def test_a_record_that_is_damaged_costs_no_scores(run, tmp_path):
    digit_folder(tmp_path / "few", ["0", "1"], 1)
    copy = tmp_path / "runs" / "version_0"
    shutil.copytree(run.folder, copy)
    (copy / "result.json").write_text("{", encoding="utf-8")
    done = linvit("evaluate", copy, "--sets", "a=few", *QUICK, cwd=tmp_path)
    assert (done.code, "result.json' cannot be read" in done.err) == (2, True)
    assert ("a", 32, None, None) in records(tmp_path)


def test_a_model_of_timm_knows_imagenets_folders(tmp_path, monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: create(name))
    image_folder(tmp_path / "r", [""], ["n01440764", "n15075141"], 2)
    done = linvit("evaluate", "timm:test_vit", "--sets", "r=r", "--batch_size", 2, *QUICK, cwd=tmp_path)
    assert done.code == 0, done.err
    (found,) = records(tmp_path).values()
    assert (found["images"], found["classes"], found["clean"]) == (4, 2, None)


def test_what_timm_resizes_otherwise_is_told(monkeypatch):
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: create(name))
    with pytest.warns(UserWarning, match="resizes images of 'repvgg_a0' by bilinear interpolation, and linvit evalua"):
        read_model("timm:repvgg_a0", torch.device("cpu"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sets", "c"], "'--sets c' has no path: write c=FOLDER"),
        (["--sets", "c=mine"], "'mine' has no corruption of c: expected folders such as 'mine/gaussian_noise/1'"),
        (["--sets", "a=mine"], "2 of the 2 classes of 'mine' are not among those of the network: 'ant', 'bee'"),
        (["--sets", "real=real.json"], "'real.json' has labels of 1 images, but the clean set has 360"),
        (["--sets", "objectnet=mine"], "objectnet=FOLDER,FILE"),
        (["--sizes", "33"], "the network does not take images of 33x33"),
    ],
)
def test_what_is_refused(run, tmp_path, arguments, message):
    image_folder(tmp_path / "mine", ["test"])
    (tmp_path / "real.json").write_text("[[1]]", encoding="utf-8")
    done = linvit("evaluate", run.folder, *arguments, *QUICK, cwd=tmp_path)
    assert done.code == 2
    assert message in done.err


def test_a_stream_is_read_as_a_table_if_asked(run, tmp_path):
    table = datasets.Dataset.from_dict(
        {"image": [Image.new("RGB", (8, 8))] * 2, "label": [0, 1]},
        datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[*"0123456789"])}),
    )
    (tmp_path / "set").mkdir()
    table.to_parquet(tmp_path / "set" / "test.parquet")
    shutil.copytree(run.folder, tmp_path / "version_0")
    config = tmp_path / "version_0" / "config.yaml"
    changed = config.read_text(encoding="utf-8").replace("streaming: false", "streaming: true")
    config.write_text(changed.replace("source: digits", "source: set"), encoding="utf-8")
    done = linvit("evaluate", "version_0", *QUICK, cwd=tmp_path)
    assert done.code == 2
    assert "images of a stream are not evaluated: --sets clean=set reads them as a table" in done.err
    assert linvit("evaluate", "version_0", "--sets", "clean=set", *QUICK, cwd=tmp_path).code == 0
    assert records(tmp_path)["clean", 32, None, None]["images"] == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:no_such_model", "timm has no trained 'no_such_model'"),
        ("other.pt2", "'other.pt2' was not written by linvit export"),
    ],
)
def test_what_is_no_model(tmp_path, name, message):
    (tmp_path / "other.onnx").write_bytes(b"x")
    done = linvit("evaluate", name, "--sets", "clean=digits", *QUICK, cwd=tmp_path)
    assert done.code == 2
    assert message in done.err
