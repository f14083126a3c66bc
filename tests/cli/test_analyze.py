"""`linvit analyze`: what it writes of trained models, and what it refuses."""

import csv
import shutil
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import linvit as package
from linvit import UserError
from linvit.analysis.maps import Query
from linvit.callbacks.attention.maps import gallery
from linvit.callbacks.dense import legend, palette
from linvit.cli import analyze
from linvit.data import ClassificationData
from linvit.experiments import analyze as experiments
from linvit.experiments.plots import heat_map
from linvit.tasks import ClassificationTask, SegmentationTask
from tests.cli.runs import linvit


@pytest.fixture
def best(run):
    return run.folder / "checkpoints" / "best.ckpt"


@pytest.fixture
def photos(tmp_path):
    """Three images of a user's, of several sizes and formats, one of a hostile name."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for name, size in (("a.png", (40, 30)), ("b.jpg", (64, 64)), ("c <b>&.png", (20, 90))):
        Image.effect_noise(size, 60).convert("RGB").save(folder / name)
    return folder


def rows(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_checkpoint_and_its_validation_images(best, tmp_path):
    done = linvit("analyze", "--ckpt_path", best.parents[1], "--count", 2, "--output", "out", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "quickstart/version_0/best" in done.out
    assert done.out.rstrip().endswith("out/index.html")
    found = rows(tmp_path / "out" / "statistics.csv")
    assert [(row["layer"], row["part"], row["head"]) for row in found] == [
        ("blocks.0.attn", part, str(head)) for part in ("", "kernel", "convolution") for head in range(3)
    ]
    assert all(float(row["rank"]) <= 32 for row in found if row["part"] == "kernel")
    (first, second) = rows(tmp_path / "out" / "predictions.csv")
    labels = ClassificationData("digits").splits["val"]["label"]
    assert [row["true class"] for row in (first, second)] == [str(labels[0]), str(labels[90])]
    assert first["quickstart/version_0/best"].endswith("%")
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert first["quickstart/version_0/best"] in page
    assert page.count("data:image/png") == 4  # two kinds of maps, each light and dark
    assert page.count("data:image/svg") == 2  # heat maps
    assert page.count('media="(prefers-color-scheme: dark)"') == 2
    assert {path.name for path in (tmp_path / "out").glob("*.[ps][nv]g")} == {
        "rank.svg",
        "effective_rank.svg",
        "maps_0_focus.png",
        "maps_0_weights.png",
    }


def test_several_checkpoints_on_images_of_ones_own(best, photos, tmp_path, monkeypatch):
    columns = []
    monkeypatch.setattr(experiments, "heat_map", lambda *a, **b: columns.append(a[3]) or heat_map(*a, **b))
    other = tmp_path / "other.ckpt"
    shutil.copy(best, other)
    config = best.parents[1] / "config.yaml"
    done = linvit(
        "analyze", "--config", config, "--ckpt_path", best, other, "--images", photos, "--output", "out", cwd=tmp_path
    )
    assert done.code == 0, done.err
    parts = ("whole matrix", "kernel", "convolution")
    assert columns[0] == [f"{name}\n{part}" for name in ("quickstart/version_0/best", "other") for part in parts]
    found = rows(tmp_path / "out" / "predictions.csv")
    assert len(found) == 3
    assert "true class" not in found[0]  # photos have none
    assert all(row["other"] == row["quickstart/version_0/best"] for row in found)
    task = ClassificationTask.load_from_checkpoint(best).eval()
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "c &lt;b&gt;&amp;.png" in page
    assert "<b>" not in page
    assert found[0]["other"].split(",")[0] in map(str, task.hparams["class_names"] or range(10))


def test_a_matrix_over_channels_is_called_that(photos, tmp_path):
    options = ["--attention", "[xca, linear]", "--img_size", "32", "--count", "1"]
    done = linvit("analyze", "--backbone", "{name: deit_nano, depth: 2}", *options, "--images", photos, cwd=tmp_path)
    assert done.code == 0, done.err
    parts = {(row["layer"], row["part"]) for row in rows(tmp_path / "analysis" / "statistics.csv")}
    assert parts == {("blocks.0.attn", "channels"), ("blocks.1.attn", "")}
    header, first, second = (line.split() for line in done.out.splitlines()[2:5])
    assert header == ["layer", "rank", "tokens", "channels"]
    assert (len(first), len(second)) == (3, 3)  # neither has both
    assert "left out: map of blocks.0.attn: XCAttention mixes the channels of each token" in " ".join(done.out.split())
    assert "not a matrix over tokens" in (tmp_path / "analysis" / "index.html").read_text(encoding="utf-8")


def test_a_file_replaces_the_weights_of_a_model_of_timm(photos, tmp_path):
    torch.save(timm.create_model("test_vit").state_dict(), tmp_path / "own.pth")
    options = ["--pretrained", "own.pth", "--img_size", "32", "--count", "1", "--images", photos]
    done = linvit("analyze", "--backbone", "timm:test_vit", *options, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "own.pth" in (tmp_path / "analysis" / "index.html").read_text(encoding="utf-8")


def refused(*arguments):
    with pytest.raises(UserError) as caught:
        analyze.main([str(argument) for argument in arguments])
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_by_name(best, tmp_path):
    content = torch.load(best, weights_only=True)
    content["state_dict"] = {
        name: tensor.new_zeros(7) if name.endswith("norm.bias") else tensor
        for name, tensor in content["state_dict"].items()
    }
    torch.save(content, tmp_path / "wrong.ckpt")
    config = best.parents[1] / "config.yaml"
    said = refused("--config", config, "--ckpt_path", tmp_path / "wrong.ckpt", "--output", tmp_path / "out")
    assert "wrong.ckpt' belongs to another model; it names backbone " in said
    assert ": network.norm.bias is (7,), not (96,)" in said
    assert not (tmp_path / "out").exists()


def test_other_mistakes_are_named(best, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.copy(best, tmp_path / "alone.ckpt")
    assert "or else a model without a run" in refused()
    assert refused("--ckpt_path", best, tmp_path / "nowhere") == f"checkpoint '{tmp_path / 'nowhere'}' does not exist"
    assert "or else a model without a run" in refused("--backbone", "deit_nano", "--ckpt_path", best)
    assert "--attention is for --backbone" in refused("--ckpt_path", best, "--attention", "linear")
    assert "missing.ckpt' does not exist" in refused("--ckpt_path", best.with_name("missing.ckpt"))
    assert "is not in the folder of a run; give its configuration" in refused("--ckpt_path", tmp_path / "alone.ckpt")
    assert "empty" in refused("--ckpt_path", best, "--images", tmp_path / "empty", "--output", tmp_path / "out")
    assert "--query: a fraction must be" in refused("--ckpt_path", best, "--query", "2", "0.5")
    spec = "{name: timm, model: resnet10t}"
    assert "has no attention that linvit can replace" in refused("--backbone", spec, "--img_size", "32")


def test_a_true_mask_stands_beside_the_predicted_one_with_the_names_of_their_classes(monkeypatch):
    mask = np.array([[0, 0, 2], [2, 2, 255]])
    batch = {"image": torch.zeros(1, 3, 32, 32), "mask": torch.from_numpy(mask)[None]}
    photo = experiments.Photo("a.png", batch, np.zeros((32, 32, 3), np.uint8))
    network = package.create_backbone("deit_nano", depth=1, img_size=32).eval()
    names = ["sky", "road", "car"]
    describe = partial(SegmentationTask.describe, SimpleNamespace(hparams={"class_names": names}))
    predicted = {"classes": [torch.ones(2, 3, dtype=torch.long)]}
    subject = experiments.AnalysedModel("m", network, lambda given: describe(given, predicted), names, {}, palette(3))
    found = experiments.analyze(subject, [photo], Query(), 100)
    assert found.described[0][:2] == ("road: 100%", "car: 50%, sky: 33%")  # 255 is no class
    assert list(found.maps[0].beside) == ["true mask", "prediction"]
    drawn = []
    monkeypatch.setattr(experiments, "legend", lambda *a: drawn.append(a[1]) or legend(*a))
    ((picture, _), _), *_ = experiments.galleries(found)
    assert drawn[0] == ["sky", "road", "car"]
    assert picture.height > gallery(found.maps, "weights").height
