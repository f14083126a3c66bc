"""The table of predictions."""

import csv
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader

from linvit.callbacks import PredictionWriter
from linvit.callbacks.predictions import name_of
from linvit.tasks.classification import ClassificationResult
from tests.training import RandomImages, tiny_task, trainer

NAMES = ["ant", "bee, wild", "cow", "dog", "eel", "fox", 'gnu "g"']


def table(path, names=None, shuffle=False, count=19):
    """Predicts random images and reads what was written."""
    torch.manual_seed(0)
    loader = DataLoader(RandomImages(count), 8, shuffle=shuffle)
    trainer(path.parent, callbacks=[PredictionWriter(path)]).predict(tiny_task(class_names=names), loader)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_image_has_its_row_in_the_order_of_the_data(tmp_path):
    rows = table(tmp_path / "predictions.csv", NAMES, shuffle=True)
    assert [row["id"] for row in rows] == [f"{i}.png" for i in range(19)]
    with torch.no_grad():
        probability, index = tiny_task().eval()(RandomImages(19).images).softmax(-1).max(-1)
    assert [row["class"] for row in rows] == [NAMES[i] for i in index.tolist()]
    assert [float(row["probability"]) for row in rows] == pytest.approx(probability.tolist(), abs=2e-6)
    assert all(len(row["probability"].partition(".")[2]) == 6 for row in rows)


def test_the_folder_is_made_and_an_older_file_replaced(tmp_path, caplog):
    path = tmp_path / "new" / "folder" / "predictions.csv"
    table(path, count=19)
    assert len(table(path, count=3)) == 3
    assert f"wrote 3 predictions to {path}" in caplog.text


def test_the_shares_of_several_devices_are_merged_and_padding_counts_once(tmp_path, monkeypatch):
    """Device 0 holds the even images, device 1 the odd ones and, as padding, image 0 again."""
    path = tmp_path / "predictions.csv"
    writer = PredictionWriter(path)
    other = {1: ("1", "b", "0.25"), 3: ("3", "b", "0.25"), 0: ("0", "a", "0.5")}

    runner = trainer(tmp_path)
    monkeypatch.setattr(type(runner), "world_size", 2)
    monkeypatch.setattr("linvit.callbacks.predictions.gather", lambda own: [own, (None, other)])
    writer.on_predict_start(runner, tiny_task())
    writer._kind, writer._rows = ClassificationResult, {0: ("0", "a", "0.5"), 2: ("2", "a", "0.5")}
    writer.on_predict_epoch_end(runner, tiny_task())
    assert [line.split(",")[0] for line in path.read_text().splitlines()] == ["id", "0", "1", "2", "3"]


def test_each_source_has_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("a/mine", "b/mine", "my photos"):
        (tmp_path / folder).mkdir(parents=True)
    sources = ["digits", "hub:owner/name", "hub:other/name", "a/mine", "b/mine", "my photos"]
    files = [name_of(source) for source in sources]
    assert files[0] == "predictions_digits"
    assert len(set(files)) == len(sources)
    assert re.fullmatch(r"predictions_mine_[0-9a-f]{6}", files[3])
    assert name_of(str(tmp_path / "a" / "mine")) == files[3]
    assert re.fullmatch(r"predictions_my_photos_[0-9a-f]{6}", files[5])
    assert name_of(None) == "predictions"


@pytest.mark.parametrize(("of_data", "expected"), [(None, [3, 7]), ([1, 2], [1, 2])])
def test_categories_have_the_ids_of_the_data_or_else_of_the_checkpoint(tmp_path, monkeypatch, of_data, expected):
    """Where the dataset was gone, they were counted from 1."""
    task = tiny_task(num_classes=2)
    task.on_load_checkpoint({"linvit": {"category_ids": [3, 7]}})
    data = SimpleNamespace(category_ids=of_data)
    result = Mock(**{"write_set.return_value": tmp_path})
    monkeypatch.setattr("linvit.callbacks.predictions.gather", lambda share: [(result, {0: "row"})])
    writer = PredictionWriter(tmp_path)
    writer._kind, writer._rows, writer._paths = None, {}, SimpleNamespace(folder=tmp_path)
    writer.on_predict_epoch_end(SimpleNamespace(datamodule=data), task)
    assert result.write_set.call_args.args[3] == expected


@pytest.mark.parametrize("said", [[3], [3, "7"], {"3": 7}, 3, None])
def test_ids_that_a_checkpoint_cannot_have_are_not_taken(said):
    task = tiny_task(num_classes=2)
    task.on_load_checkpoint({"linvit": {"category_ids": said}})
    assert task.category_ids is None
