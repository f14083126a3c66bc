"""A data module of another task, with what `ImageData` asks for and no more: pixel labels, boxes, whole samples."""

import io
import pickle
from functools import partial

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as v2

from linvit.data.base import ImageData
from linvit.data.loading.sampler import generator
from linvit.data.sources.images import Target
from linvit.data.transforms.geometry import Box, PixelOp, apply, crop, resize
from linvit.data.transforms.on_device import DeviceOps
from linvit.runs.options import read_config
from linvit.runs.run import Run
from tests.data.images import png


def labels_of(stored, name):
    """A greyscale file as labels (H, W)."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(stored["bytes"]))))


def boxes_of(cell, name):
    return torch.tensor(cell, dtype=torch.float32).view(-1, 4)


def crop_flip_resize(sample, seed):
    """Drawn once, done to image, mask and boxes."""
    rng = generator(seed)
    box = Box(int(rng.integers(4)), int(rng.integers(6)), 20, 30)
    ops = [partial(crop, box=box), partial(resize, size=(24, 16), interpolation="bilinear", antialias=False)]
    ops += [v2.horizontal_flip] if rng.random() < 0.5 else []
    return apply(ops, sample) | {"device_ops": DeviceOps(seed, (PixelOp("brightness", 1.0),), None)}


def resized(sample, seed):
    return apply([partial(resize, size=(24, 16))], sample)


class DenseData(ImageData):
    """White rectangles with their masks and boxes."""

    list_keys = ("boxes",)
    num_classes = 2
    class_names = None

    def __init__(self, source, **data):
        super().__init__(source, img_size=(24, 16), **data)
        self.train_transform = crop_flip_resize
        self.eval_transform = resized

    def targets(self, split):
        return {"mask": Target("mask", labels_of), "boxes": Target("boxes", boxes_of)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """24 images of 24 x 36 pixels with a rectangle each; every fourth has none."""
    root = tmp_path_factory.mktemp("dense")
    rows = {"image": [], "mask": [], "boxes": []}
    for index in range(24):
        pixels = np.zeros((24, 36), np.uint8)
        box = [8 + index % 3, 6, 20, 15 + index % 5]
        if index % 4:
            pixels[box[1] : box[3], box[0] : box[2]] = 255
        rows["image"].append({"bytes": png(Image.fromarray(pixels).convert("RGB")), "path": None})
        rows["mask"].append({"bytes": png(Image.fromarray(pixels // 255)), "path": None})
        rows["boxes"].append([box] if index % 4 else [])
    kinds = {
        "image": datasets.Image(),
        "mask": datasets.Image(),
        "boxes": datasets.List(datasets.List(datasets.Value("float32"))),
    }
    datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).to_parquet(root / "train.parquet")
    return str(root)


@pytest.mark.parametrize("workers", [0, 2])
def test_masks_and_boxes_come_with_the_images_that_they_belong_to(source, workers):
    data = DenseData(source, batch_size=4, num_workers=workers, mean=[0] * 3, std=[1] * 3)
    data.setup("fit")
    empty = 0
    for loader in (data.train_dataloader(), data.val_dataloader()):
        for batch in loader:
            batch = data.on_after_batch_transfer(batch, 0)
            assert batch["image"].shape[1:] == (3, 24, 16)
            assert isinstance(batch["boxes"], list)
            for image, mask, boxes in zip(batch["image"], batch["mask"], batch["boxes"], strict=True):
                assert (((image[0] > 0.5) != (mask == 1)).float().mean()) < 0.1
                empty += not len(boxes)
                for x1, y1, x2, y2 in boxes.tolist():
                    assert mask.sum() == pytest.approx((x2 - x1) * (y2 - y1), rel=0.35)
                    assert mask[round(y1 + 1) : round(y2 - 1), round(x1 + 1) : round(x2 - 1)].all()
    assert empty
    assert data.preview(3)["train"].shape == (3, 3, 24, 16)


def test_prediction_needs_no_targets(source):
    data = DenseData(source, batch_size=4, num_workers=0)
    data.setup("predict")
    assert data.predict_set[0].keys() == {"image", "index", "id"}


@pytest.mark.parametrize(
    "config", ["quickstart", "segmentation_quickstart", "detection_quickstart", "diagnostics/recall"]
)
def test_samples_can_be_sent_to_spawned_processes(config):
    """As on Windows and macOS, and on Linux from Python 3.14 on; a trainer cannot be sent."""
    data = Run.from_config(read_config(config, {"data.num_workers": 0})).data
    data.setup("fit")
    both = data.train_set, data.val_dataloader().dataset
    data.trainer = lambda: None
    for samples in both:
        again = pickle.loads(pickle.dumps(samples))
        assert torch.equal(again[0]["image"], samples[0]["image"])
