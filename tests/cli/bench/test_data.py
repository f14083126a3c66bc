"""`linvit bench data`, and the folder that benchmarks make."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import linvit
from linvit.cli import main
from linvit.cli.bench import data as bench
from tests.data.images import image_folder

ROOT = Path(__file__).parents[3]


def like_imagenet(folder):
    """A tiny folder of the benchmarks' images."""
    script = ROOT / "benchmarks" / "imagenet_like.py"
    subprocess.run([sys.executable, script, folder, "--train=80", "--val=20", "--side=60"], check=True)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return like_imagenet(tmp_path_factory.mktemp("like") / "set")


def test_the_folder_has_twenty_classes_and_is_the_same_every_time(folder, tmp_path):
    files = sorted(folder.rglob("*.jpg"))
    assert len(files) == 100
    assert len(list((folder / "train").iterdir())) == len(list((folder / "val").iterdir())) == 20
    again = like_imagenet(tmp_path / "again")
    for file in files:
        assert (again / file.relative_to(folder)).read_bytes() == file.read_bytes()


def test_ours_and_timm_s_rates_and_their_ratio_are_printed(folder, capsys):
    threads = torch.get_num_threads()
    assert main(["bench", "data", str(folder), "--images=64", "--rounds=1"]) == 0
    assert torch.get_num_threads() == threads  # though it measures on one
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^  (\S.*?)  +(\d+) +[\d.]+$", printed, re.MULTILINE))
    assert len(rows) == 3
    assert next(iter(rows)).startswith("timm ")
    assert all(int(rate) > 0 for rate in rows.values())
    ours = re.search(r"^  linvit +(\d+) +([\d.]+)$", printed, re.MULTILINE)
    assert float(ours[2]) == pytest.approx(int(ours[1]) / int(next(iter(rows.values()))), rel=0.05)


def test_generated_images_are_measured_without_timm(capsys):
    assert main(["bench", "data", "--config=diagnostics/recall", "--images=64", "--rounds=1"]) == 0
    printed = capsys.readouterr().out
    assert "timm's loader is left out; it does not do DiagnosticData" in printed
    assert re.findall(r"^  (\S.*?)  +\d+ +[\d.]+$", printed, re.MULTILINE) == ["linvit"]


@pytest.mark.parametrize(
    ("augmentation", "lacking"),
    [
        ({"crop_scale": None}, "crop_scale: null"),
        ({"rotate": 10, "zoom": 0.1, "auto_augment": "rand-m9-mstd0.5-inc1"}, "rotate, zoom"),
    ],
    ids=str,
)
def test_a_recipe_that_timm_has_not_is_measured_without_timm(folder, tmp_path, capsys, augmentation, lacking):
    data = {"source": str(folder), "img_size": 32, "batch_size": 16, "augmentation": augmentation}
    content = {"data": {"init_args": data}}
    config = tmp_path / "x.yaml"
    config.write_text(yaml.safe_dump({"base": str(ROOT / "configs/imagenet/deit_tiny.yaml"), **content}))
    assert main(["bench", "data", "--config", str(config), "--images=16", "--rounds=1"]) == 0
    printed = capsys.readouterr().out
    assert f"\ntimm's loader is left out; it does not do {lacking}\n" in printed
    assert len(re.findall(r"^  linvit.* \d+ +[\d.]+$", printed, re.MULTILINE)) == 2


def test_the_configuration_of_a_run_is_one(run, capsys):
    assert main(["bench", "data", "--config", str(run.folder / "config.yaml"), "--images=16", "--rounds=1"]) == 0
    assert "images/s per core" in capsys.readouterr().out


def test_a_folder_in_place_of_the_configuration_s_data_has_its_own_classes(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "rate", lambda loader, images: 1.0)
    monkeypatch.setattr(bench, "_loader", lambda data, _: print(f"{data.num_classes} classes"))
    config = tmp_path / "x.yaml"
    config.write_text(f"base: {ROOT}/configs/quickstart.yaml\ndata: {{init_args: {{num_classes: 10}}}}\n")
    assert main(["bench", "data", str(folder), "--config", str(config), "--images=1", "--rounds=1"]) == 0
    assert "20 classes" in capsys.readouterr().out


def test_nothing_to_measure_is_a_user_error():
    with pytest.raises(linvit.UserError, match="needs images"):
        bench.main([])


def test_a_mistake_in_the_configuration_is_a_user_error(tmp_path):
    config = tmp_path / "x.yaml"
    config.write_text("data: {class_path: linvit.data.ClassificationData, init_args: {batch_sice: 3}}\n")
    with pytest.raises(linvit.UserError, match="batch_sice"):
        bench.main(["--config", str(config)])


def test_fewer_images_than_a_batch_are_refused(tmp_path):
    image_folder(tmp_path, ["train", "val"])
    with pytest.raises(linvit.UserError, match=r"has 6 training images, less than one batch of 64; add some"):
        bench.main([str(tmp_path)])


def test_options_may_stand_between_what_is_measured_and_where(folder, monkeypatch, capsys):
    monkeypatch.setattr(bench, "rate", lambda loader, images: 1.0)
    assert main(["bench", "data", "--images", "1", "--rounds", "1", str(folder)]) == 0
    assert f"1 images, drawn from the 80 of {folder}" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--images", "--rounds"])
def test_a_round_has_an_image_and_a_run_has_a_round(option, tmp_path):
    with pytest.raises(linvit.UserError, match=f"{option} must be a whole number at least 1; got 0"):
        bench.main([str(tmp_path), option, "0"])
