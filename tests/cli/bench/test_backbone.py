"""`linvit bench backbone`: tables over the image size, and accuracy over time, published or one's own."""

import csv

import pytest

from linvit.cli import bench
from linvit.experiments.bench import builders
from linvit.registry.model_info import model_info

QUICK = ["--img_sizes=32,32x48", "--budget=0.05"]


@pytest.fixture(autouse=True)
def _own_memory(monkeypatch):
    monkeypatch.setattr("linvit.cli.bench.costs.keep_memory", lambda: None)
    monkeypatch.setattr("linvit.cli.bench.costs.processor_share", lambda: 1.0)


def test_sizes_and_crossover(tmp_path, capsys):
    given = ["deit_nano", "{name: deit_nano, attention: linear}", *QUICK]
    assert bench.main(["backbone", *given, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "32x32" in printed
    assert "32x48" in printed
    assert "a module costs at most what deit_nano does" in " ".join(printed.split())
    with (tmp_path / "costs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["note"] for row in rows] == [""] * 4
    assert all(float(row["training_step_seconds"]) > float(row["forward_seconds"]) for row in rows)
    assert rows[0]["forward_backward_seconds"] == ""
    assert [row["softmax_blocks"] for row in rows] == ["4", "0"] * 2
    assert "| deit_nano | 4 | 32x32 |" in (tmp_path / "costs.md").read_text(encoding="utf-8")
    info = model_info()["deit_nano"]
    assert (int(rows[0]["parameters"]), int(rows[0]["macs"])) == (info.parameters, info.macs)


def test_published_accuracy_is_labelled_and_not_of_backbones_that_were_changed(tmp_path, monkeypatch, capsys):
    info = model_info()
    monkeypatch.setattr(builders, "model_info", lambda: info | {"deit_nano": info["deit_nano"]._replace(top1=1.5)})
    given = ["deit_nano", "--img_sizes=32,48", "--budget=0.01", "--forward_only"]
    assert bench.main(["backbone", *given, "--output", str(tmp_path / "own")]) == 0
    assert "crossover" not in capsys.readouterr().out  # of one backbone with itself
    assert "published ImageNet-1K top-1, %" in (tmp_path / "own" / "accuracy.svg").read_text(encoding="utf-8")
    assert bench.main(["backbone", *given, "--attention=hydra", "--output", str(tmp_path / "other")]) == 0
    assert not (tmp_path / "other" / "accuracy.svg").exists()
