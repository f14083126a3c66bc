"""The table of classes, against counts by hand."""

import csv

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from linvit.callbacks import ClassReport
from tests.training import CLASSES, RandomImages, batches, tiny_task, trainer

NAMES = ["ant", "bee, wild", "cow", "dog", "eel", "fox", "gnu"]


def by_hand(task, count):
    """Images and top-1 of each class."""
    data = RandomImages(count)
    with torch.no_grad():
        right = task.eval()(data.images).argmax(-1) == data.labels
    rows = []
    for label in range(CLASSES):
        mine = data.labels == label
        rows.append([str(int(mine.sum())), f"{right[mine].double().mean():.6f}" if mine.any() else ""])
    return rows


def table(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


@pytest.mark.parametrize(("verb", "stage", "names"), [("validate", "val", None), ("test", "test", NAMES)])
def test_each_class_has_its_row(tmp_path, verb, stage, names):
    report, task = ClassReport(tmp_path / "new"), tiny_task(class_names=names)
    getattr(trainer(tmp_path, callbacks=[report]), verb)(task, batches(5), verbose=False)
    header, *rows = table(tmp_path / "new" / f"{stage}_classes.csv")
    assert header == ["class", "images", "top1"]
    assert [row[0] for row in rows] == (names or [str(i) for i in range(CLASSES)])
    assert [row[1:] for row in rows] == by_hand(task, 5)
    assert ["0", ""] in [row[1:] for row in rows]  # a class without images has no accuracy
    assert Image.open(tmp_path / "new" / f"{stage}_confusion.png").size[0] > 100


def test_training_reports_each_validation_of_both_kinds_of_weights(tmp_path):
    board = TensorBoardLogger(tmp_path, default_hp_metric=False)
    report, task = ClassReport(), tiny_task(ema_decay=0.9, lr=1e-2, warmup_epochs=0)
    runner = trainer(tmp_path, max_epochs=3, logger=board, callbacks=[report], num_sanity_val_steps=1)
    runner.fit(task, batches(16), batches(19))
    folder = tmp_path / "lightning_logs" / "version_0"
    header, *rows = table(folder / "val_classes.csv")
    assert header == ["class", "images", "top1", "ema_top1"]
    assert [row[1:3] for row in rows] == by_hand(task, 19)
    assert [[row[1], row[3]] for row in rows] == by_hand(task.ema, 19)
    titles, *images = table(folder / "val_images.csv")
    assert titles == ["image", "label", "raw", "ema"]
    assert [row[:2] for row in images] == [
        [str(i), str(label)] for i, label in enumerate(RandomImages(19).labels.tolist())
    ]
    right = [sum(row[1] == row[column] for row in images) for column in (2, 3)]
    assert right == [round(sum(int(n) * float(top1 or 0) for n, top1 in by_hand(one, 19))) for one in (task, task.ema)]
    log = EventAccumulator(str(folder)).Reload()
    assert [event.step for event in log.Images("val/confusion")] == [1, 3, 5]  # as the curves


def test_nothing_is_written_where_nothing_is_kept(tmp_path):
    trainer(tmp_path, max_epochs=1, callbacks=[ClassReport()]).fit(tiny_task(), batches(16), batches(19))
    trainer(tmp_path, fast_dev_run=True, callbacks=[ClassReport(tmp_path)]).fit(tiny_task(), batches(16), batches(8))
    assert not list(tmp_path.rglob("*.csv"))
