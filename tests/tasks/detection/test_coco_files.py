"""From COCO's files through the data module to COCO's figures: nothing on the way changes them."""

import json

import numpy as np
import pytest
from PIL import Image

from linvit.data import DetectionData
from linvit.tasks.detection.evaluation import DetectionResults, Objects
from tests.golden_files import load

GOLDEN = load("dense_coco_eval")
DETECTIONS = GOLDEN.meta["detections"]


def found(image_id, size, labels):
    """The stored detections of an image as a detector's."""
    mine = [each for each in DETECTIONS if each["image_id"] == image_id]
    boxes = np.array([each["bbox"] for each in mine]).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    classes = np.array([labels[each["category_id"]] for each in mine], dtype=np.int64)
    counts = [each["segmentation"]["counts"] for each in mine]
    return Objects(size, boxes, classes, counts, np.array([each["score"] for each in mine]))


@pytest.mark.parametrize(("area_from", "masks"), [("mask", "segm"), ("box", "segm_box_area")])
def test_figures_of_coco_s_files_are_the_stored_ones(tmp_path, area_from, masks):
    """Crowds, an image without objects, category ids 1, 2 and 13."""
    for split in ("train", "val"):
        for image in GOLDEN.meta["ground_truth"]["images"]:
            path = tmp_path / split / image["file_name"]
            path.parent.mkdir(exist_ok=True)
            Image.new("RGB", (image["width"], image["height"])).save(path)
        (tmp_path / "annotations").mkdir(exist_ok=True)
        content = json.dumps(GOLDEN.meta["ground_truth"])
        (tmp_path / "annotations" / f"instances_{split}.json").write_text(content, encoding="utf-8")
    data = DetectionData(str(tmp_path), masks=True, num_workers=0, batch_size=2)
    data.setup("validate")
    results = DetectionResults(data.num_classes, ["box", "mask"], area_from)
    labels = {number: label for label, number in enumerate(data.category_ids)}
    for batch in data.val_dataloader():
        given = data.on_after_batch_transfer(batch, 0)
        for i, index in enumerate(given["index"].tolist()):
            true = Objects.of_truth(given, i)
            results.update(index, true, found(int(given["image_id"][i]), true.size, labels))
    figures = np.array([*results.figures().values()], dtype=np.float32)
    stored = np.concatenate([GOLDEN.tensors[f"output.{name}"].numpy() for name in ("bbox", masks)])
    assert (figures == stored).all()
