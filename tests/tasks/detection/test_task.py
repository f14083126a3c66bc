"""Detection: losses, figures, reports and files of a network that finds squares."""

import sys

import pytest
import torch
from faster_coco_eval import COCO
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from linvit import UserError
from linvit.tasks import DetectionTask
from tests.tasks.detection.squares import SIZE, Squares, batch, finder_task
from tests.training import trainer


def test_the_loss_is_the_sum_of_the_detector_s_with_the_targets_that_its_head_wants():
    task = finder_task()
    given = batch(range(5), training=True)
    assert task.training_loss(given) == 4
    targets = task.network.seen[0]
    assert [sorted(target) for target in targets] == [["boxes", "labels", "masks"]] * 5
    assert [len(target["boxes"]) for target in targets] == [0, 1, 1, 1, 1]
    del given["masks"]
    with pytest.raises(UserError, match=r"'mask_rcnn' predicts masks, and this data has none: set --data\.masks=true"):
        task.training_loss(given)
    alone = finder_task(head="retinanet")
    alone.training_loss(given)
    assert sorted(alone.network.seen[0][0]) == ["boxes", "labels"]


def figures(task, rows):
    """The figures of images in a given order, in batches of two."""
    metrics = task.configure_metrics()
    with torch.no_grad():
        for start in range(0, len(rows), 2):
            task.score_batch(task.network, batch(rows[start : start + 2]), metrics)
    return {name: metric.compute().item() for name, metric in metrics.items()}


def test_figures_do_not_depend_on_the_order_and_an_image_that_comes_twice_counts_once():
    task = finder_task().eval()
    once = figures(task, [*range(12)])
    assert once == figures(task, [11, 3, 0, *range(12), 5, 5])
    assert len(once) == 24
    assert 0 < once["box_AP"] < once["box_AP50"] == once["mask_AP"] == 1
    assert figures(finder_task(head="retinanet").eval(), [*range(12)]).keys() == {
        name for name in once if name.startswith("box_")
    }


def test_a_run_logs_draws_reports_and_writes_files(tmp_path):
    task = finder_task(ema_decay=0.99, lr=0.2)
    logger = TensorBoardLogger(tmp_path, name="", version="")
    runner = trainer(tmp_path, max_epochs=3, logger=logger)
    runner.fit(task, datamodule=Squares())
    scores = runner.callback_metrics
    assert scores["val/score"] == scores["val/box_AP"] > scores["val/ema_score"] > 0
    assert {"train/loss", "train/loss_box", "train/loss_cls", "val/mask_APs", "val/ema_mask_AR100"} <= scores.keys()
    logger.save()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Images("val/detection")) == 3
    table = (tmp_path / "val_classes.csv").read_text(encoding="utf-8").splitlines()
    assert table[0] == "class,objects,box_AP,box_AP50,box_AP75,mask_AP,mask_AP50,mask_AP75"
    assert [row.split(",")[:2] for row in table[1:]] == [["red", "4"], ["green|x", "5"]]
    assert Image.open(tmp_path / "val_precision_recall.png").width == 1000
    assert Image.open(tmp_path / "val_detection.png").width == 1200
    task.report_folder = tmp_path
    runner = trainer(tmp_path)
    runner.test(task, datamodule=Squares(), verbose=False)
    assert (tmp_path / "test_classes.csv").exists()
    runner.predict(task, datamodule=Squares())
    folder = tmp_path / "predictions_photos"
    assert sorted(path.name for path in folder.glob("*.jpg")) == sorted(f"{i}.jpg" for i in range(12))
    truth = COCO(folder / "images.json")
    found = truth.loadRes(folder / "results.json")
    assert truth.imgs[101] == {"id": 101, "file_name": "1.png", "height": 40, "width": 56}
    assert [each["name"] for each in truth.loadCats([1, 2])] == ["red", "green|x"]
    assert len(found.anns) == 9
    assert found.annToMask(found.loadAnns(found.getAnnIds(imgIds=101))[0]).shape == SIZE


def test_a_package_that_is_missing_is_asked_for_before_training(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    with pytest.raises(UserError, match=r"needs the package 'faster-coco-eval': pip install"):
        trainer(tmp_path, max_epochs=1).fit(finder_task(), datamodule=Squares())


def test_a_detector_trains_and_is_scored_in_mixed_precision(tmp_path):
    torch.manual_seed(0)
    backbone = {"name": "pvt_v2_b0", "embed_dims": [8, 8, 16, 16], "depths": [1] * 4, "num_heads": [1, 1, 2, 2]}
    head = {"name": "mask_rcnn", "width": 8, "fc_width": 16, "score_threshold": 0}
    task = DetectionTask(backbone=backbone, head=head, num_classes=2, img_size=32, warmup_epochs=0)
    runner = trainer(tmp_path, max_epochs=1, precision="bf16-mixed", gradient_clip_val=1.0, limit_train_batches=2)
    runner.fit(task, datamodule=Squares())
    assert torch.isfinite(runner.callback_metrics["train/loss"])
    assert runner.callback_metrics["val/box_AR100"] >= 0
