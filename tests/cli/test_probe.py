"""`linvit probe`: tables and page of several networks, and what is refused."""

import csv
import re

import pytest

from linvit.backbones.trained import trained_backbone
from tests.cli.runs import linvit
from tests.data.images import picture, save


@pytest.fixture
def shades(tmp_path):
    """A folder of dark and of bright images; of those to test one of four lies in the wrong class."""
    for split, count in (("train", 6), ("val", 2), ("test", 4)):
        for name, other in (("dark", "bright"), ("bright", "dark")):
            for i in range(count):
                folder = other if split == "test" and i == 0 else name
                shade = picture(i).point(lambda value, name=name: value // 4 + 190 * (name == "bright"))
                save(shade, tmp_path / "shades" / split / folder / f"{name}{i}.png")
    return "--data.source=shades"


def test_a_run_beside_random_weights(run, shades, tmp_path):
    options = ["--random", "--neighbours", 3, "--output", "out"]
    done = linvit("probe", run.folder, shades, *options, cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.rstrip().endswith("out/index.html")
    with (tmp_path / "out" / "probe.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["network"] for row in rows] == [f"{run.folder}, random", str(run.folder)]
    for row in rows:
        assert (row["layer"], row["feature"]) == ("blocks.0", "mean")
        assert (row["kNN, k = 3"], row["linear"]) == ("0.7500", "0.7500")
    assert "| blocks.0 | mean | 0.7500 | 0.7500 |" in (tmp_path / "out" / "probe.md").read_text(encoding="utf-8")
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert page.count("data:image/svg") == 2
    assert "12 of train, 8 of test" in page


def test_labels_are_needed(run, tmp_path):
    for i in range(20):
        save(picture(i), tmp_path / "photos" / f"{i}.png")
    done = linvit("probe", run.folder, "--data.source=photos", "--output", "out", cwd=tmp_path)
    assert done.code == 2
    assert "'photos' has no labels" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "'missing' is neither a run, NAME/version_N, nor a checkpoint in one, nor timm:MODEL"),
        (["--config=segmentation_quickstart"], "'digit_scenes' is for SegmentationData: give labelled images"),
        (["--config=quickstart", "--model.backbone={name: timm, model: resnet18x}"], "has no model 'resnet18x'"),
        (["--config=quickstart", "--data.token_budget=64", "--data.patch_size=4"], "set --data.token_budget=null"),
        (["--config=quickstart", "--epochs", "9"], "probe --epochs was removed. Use linvit probe without it"),
        (["--config=quickstart", "--layers", "7"], "feature indices \\[7\\] do not fit 4 features"),
    ],
)
def test_what_is_refused(arguments, message, tmp_path):
    done = linvit("probe", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert re.search(message, done.err), done.err


def test_a_model_of_timm_has_images_as_it_takes_them():
    known = trained_backbone("timm:vit_tiny_patch16_224")
    assert known is not None
    assert known.spec == {"name": "timm", "model": "vit_tiny_patch16_224", "pretrained": True}
    images = {"mean": [0.5, 0.5, 0.5], "img_size": [224, 224], "crop_pct": 0.9, "crop_mode": "center"}
    assert images.items() <= known.images.items()
    squashed = trained_backbone("timm:eva02_base_patch14_448")
    assert squashed is not None
    assert squashed.images["crop_mode"] == "squash"
    assert trained_backbone("checkpoints/mine/version_0") is None
