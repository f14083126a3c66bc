"""Segmentation: training, scoring and prediction by hand-made batches and in a run."""

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from torch.nn import functional as F

from linvit import UserError
from linvit.heads.segmentation import inference
from linvit.ignore_index import IGNORE_INDEX
from linvit.tasks import SegmentationTask
from linvit.tasks.segmentation import task as segmentation
from linvit.tasks.segmentation.scores import mean_scores
from tests.data.images import picture, save
from tests.helpers import leaves, randn
from tests.second_task.data import InkData
from tests.training import trainer

BACKBONE = {
    "name": "pvt_v2_b0",
    "embed_dims": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 1, 2, 2],
    "sr_ratios": [1] * 4,
}
HEAD = {"name": "upernet", "width": 8, "auxiliary_width": 4}
SMALL = {"backbone": BACKBONE, "attention": "linear", "head": HEAD, "num_classes": 3, "img_size": 32}


def task(**options):
    torch.manual_seed(0)
    return SegmentationTask(**{**SMALL, "warmup_epochs": 0, "lr": 1e-2, **options})


def batch(classes=3):
    """Two images, and labels of which a corner is ignored."""
    image, mask = randn(2, 3, 32, 32).float(), torch.randint(classes, (2, 32, 32), dtype=torch.uint8)
    mask[:, :5, :7] = IGNORE_INDEX
    return {"image": image, "mask": mask, "id": ["a", "b"]}


def test_the_loss_is_that_of_the_logits_and_of_the_auxiliary_output():
    given = batch()
    label = given["mask"].long()
    model = task()
    model.network.eval()
    logits, (auxiliary,) = model.network(given["image"], auxiliary=True)
    losses = [
        F.cross_entropy(x, label, ignore_index=IGNORE_INDEX, reduction="none").mean() for x in (logits, auxiliary)
    ]
    torch.testing.assert_close(model.training_loss(given), losses[0] + 0.4 * losses[1])
    alone = task(auxiliary_weight=0, loss_average="valid")
    alone.network.load_state_dict(model.network.state_dict())
    alone.network.eval()
    loss = alone.training_loss(given)
    torch.testing.assert_close(loss, F.cross_entropy(logits, label, ignore_index=IGNORE_INDEX))
    assert all(id(weight) in leaves(loss) for weight in alone.parameters() if weight.requires_grad)  # for DDP


@pytest.mark.parametrize("options", [{}, {"window": 16, "stride": 8}, {"scales": [0.5, 1.0], "mirror": True}], ids=str)
def test_scores_are_those_of_the_whole_set_at_the_labels_size(options, monkeypatch):
    """Images of several sizes, each with labels of another size, in bands of one row; two of four at once."""
    monkeypatch.setattr(inference, "BAND_BYTES", 1)
    monkeypatch.setattr(segmentation, "PIXELS", 2 * 24 * 32)
    model = task(**options).eval()
    images = [randn(3, 32, 40).float(), *randn(3, 3, 24, 32, seed=1).float()]
    masks = [torch.randint(3, size, dtype=torch.uint8) for size in ((50, 61), (24, 32), (24, 32), (24, 32))]
    sizes = [mask.shape for mask in masks]
    assert list(segmentation.of_one_size(images, sizes)) == [[0], [1, 2], [3]]
    masks[0][:9] = IGNORE_INDEX
    metrics = model.configure_metrics()
    with torch.no_grad():
        found = model.score_batch(model.network, {"image": images, "mask": masks}, metrics)
        predicted = model.predict_batch(model.network, {"image": images, "id": "abcd", "size": sizes})
    matrix = torch.zeros(3, 3, dtype=torch.long)
    for classes, mask, again in zip(found, masks, predicted["classes"], strict=True):
        assert classes.shape == mask.shape
        assert torch.equal(classes, again)
        kept = mask != IGNORE_INDEX
        matrix += torch.bincount(3 * mask[kept].long() + classes[kept], minlength=9).view(3, 3)
    for name, score in mean_scores(matrix).items():
        torch.testing.assert_close(metrics[name].compute(), score.float())
    if not options:
        losses = [
            F.cross_entropy(
                F.interpolate(model.network(image[None]), mask.shape, mode="bilinear"),
                mask[None].long(),
                ignore_index=IGNORE_INDEX,
                reduction="sum",
            )
            for image, mask in zip(images, masks, strict=True)
        ]
        torch.testing.assert_close(metrics["loss"].compute(), sum(losses) / matrix.sum())


def test_classes_are_left_out_by_name():
    names = ["road", "tree", "clutter"]
    scores = task(class_names=names, exclude_from_mean=["clutter"]).configure_metrics()
    assert scores["mIoU"].state.exclude_from_mean == [2]
    with pytest.raises(UserError, match=r"exclude_from_mean must be one of road, tree, clutter; got 'water'"):
        task(class_names=names, exclude_from_mean=["water"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": 8}, "there are no windows"),
        ({"stride": 24, "window": 16}, "stride of windows of 16 pixels"),
        ({"scales": []}, "at least one factor"),
        ({"scales": [0]}, "scales must be a number above 0"),
        ({"loss_average": "some"}, "loss_average"),
        ({"score": "miou"}, "score must be one of mIoU, .*; got 'miou'"),
        ({"head": "no_such_head"}, "no head is called 'no_such_head'"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        task(**options)


def test_a_run_learns_scores_reports_and_writes_masks(tmp_path):
    data = InkData(batch_size=16, num_workers=0, img_size=32)
    names = list(data.class_names)
    model = task(num_classes=2, class_names=names, ema_decay=0.5, score="mAcc")
    logger = CSVLogger(tmp_path, name="", version="")
    runner = trainer(tmp_path, max_epochs=2, limit_train_batches=15, limit_val_batches=3, logger=logger)
    runner.fit(model, datamodule=data)
    scores = runner.callback_metrics
    assert scores["val/score"] == scores["val/mAcc"] != scores["val/mIoU"] > 0.7
    assert task().score_metric == "mIoU"
    assert {"val/ema_score", "val/mAcc", "val/aAcc", "val/mF1", "val/kappa", "val/loss"} <= scores.keys()
    model.report_folder = tmp_path
    runner = trainer(tmp_path, limit_test_batches=3, limit_predict_batches=1)
    runner.test(model, datamodule=data, verbose=False)
    table = (tmp_path / "test_classes.csv").read_text(encoding="utf-8").splitlines()
    assert table[0] == "class,pixels,IoU,Acc,F1"
    assert [row.split(",")[0] for row in table[1:]] == names
    assert Image.open(tmp_path / "test_confusion.png").width > 200
    shown = tmp_path / "val_segmentation.png"
    assert Image.open(shown).width == 960  # image, labels and prediction
    shown.unlink()
    trainer(tmp_path, limit_val_batches=1).validate(model, datamodule=data, verbose=False)
    assert not shown.exists()  # a validation without a logger has no folder
    runner.predict(model, datamodule=data)
    (folder,) = tmp_path.glob("predictions_*")
    masks = sorted(path for path in folder.glob("*.png") if path.stem != "legend")
    assert len(masks) == 16 == len(list(folder.glob("*_overlay.jpg")))
    assert set(np.unique(np.asarray(Image.open(masks[0])))) <= {0, 1}
    save(picture(0, 40, 40), tmp_path / "photos" / "roofs" / "b.png")
    elsewhere = InkData(predict_path=str(tmp_path / "photos"), num_workers=0, img_size=32)
    runner.predict(model, datamodule=elsewhere)
    assert len([*tmp_path.glob("predictions_photos_*/roofs/b.png")]) == 1
