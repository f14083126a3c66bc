"""Images of other bands or more bits in the three tasks: from the file to the first convolution, or refused by name."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from linvit.data import ClassificationData, DetectionData, SegmentationData
from linvit.data.transforms.classification import Augmentation
from linvit.data.transforms.segmentation import SegmentationAugmentation
from linvit.errors import UserError
from linvit.heads.detection.detector import create_detector
from linvit.runs.checkpoint import Checkpoint
from linvit.tasks import SegmentationTask
from tests.data.coco import write_coco
from tests.rasters import values, write
from tests.training import trainer

FOUR = {"bands": [4, 1, 2, 3], "value_range": (0, 9000), "mean": [0.5] * 4, "std": [0.25] * 4}
SMALL = {"batch_size": 2, "num_workers": 0, "seed": 0}
PLAIN = SegmentationAugmentation(ratio=(1, 1), max_class_ratio=None, photometric=False)


@pytest.fixture
def pairs(tmp_path):
    for split in ("train", "val"):
        for index in range(2):
            write(tmp_path / split / "images" / f"{index}.tif", values(index))
            (tmp_path / split / "masks").mkdir(exist_ok=True)
            Image.fromarray(np.eye(24, 32, dtype=np.uint8)).save(tmp_path / split / "masks" / f"{index}.png")
    return tmp_path


@pytest.fixture
def classes(tmp_path):
    for index in range(8):
        write(tmp_path / ("train", "val")[index % 2] / "ab"[index // 4] / f"{index}.tif", values(index))
    return tmp_path


def segmentation(source, **options):
    return SegmentationData(str(source), num_classes=2, img_size=16, augmentation=PLAIN, **SMALL, **options)


def classification(source, **options):
    return ClassificationData(str(source), img_size=16, augmentation=Augmentation(rotate=10), **SMALL, **options)


def test_segmentation_sees_all_bands(pairs, tmp_path):
    data = segmentation(pairs, **FOUR)
    data.setup("fit")
    image = data.val_set[0]["image"]
    torch.testing.assert_close(image.numpy(), values(0)[[3, 0, 1, 2]] * np.float32(255 / 9000))
    task = SegmentationTask(
        backbone={"name": "pvt_v2_b0", "sr_ratios": [1, 1, 1, 1], "depths": [1, 1, 1, 1]},
        head="semantic_fpn",
        num_classes=2,
        img_size=16,
        in_chans=data.in_chans,
    )
    run = trainer(tmp_path / "run", max_epochs=1)
    run.fit(task, datamodule=data)
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert SegmentationTask.load_from_checkpoint(tmp_path / "x.ckpt").hparams["in_chans"] == 4
    checkpoint = Checkpoint(tmp_path / "x.ckpt")
    assert checkpoint.facts(["in_chans"], data, False, "") == {"in_chans": 4}
    with pytest.raises(UserError, match=r"was trained on images of 4 channels, but the data gives 3: set --data.bands"):
        checkpoint.facts(["in_chans"], SimpleNamespace(in_chans=3), False, "")


def test_one_band_of_8_bits_stays_one(tmp_path):
    data = ClassificationData(img_size=32, bands=[1], mean=[0.5], std=[0.25], **SMALL)
    data.setup("fit")
    assert data.train_set[0]["image"].shape == (1, 32, 32)
    assert data.train_set[0]["image"].dtype == torch.uint8


def test_detection_sees_all_bands(tmp_path):
    root = write_coco(tmp_path)
    for path in root.rglob("*.png"):
        with Image.open(path) as opened:
            width, height = opened.size
        write(path.with_suffix(".tif"), values(0, 4, height, width)).replace(path)  # whatever it is called
    data = DetectionData(str(root), **SMALL, **FOUR)
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    data.finish(batch)
    network = create_detector("pvt_v2_b0", "retinanet", 3, in_chans=data.in_chans)
    assert network.backbone.stages[0].embed.proj.in_channels == 4
    assert batch["image"][0].shape[0] == 4
    with pytest.raises(UserError, match=r"image .*: it has 4 bands of uint16, and without --data.bands"):
        DetectionData(str(root), **SMALL).setup("fit")


@pytest.mark.parametrize("stage", ["fit", "predict"])
@pytest.mark.parametrize(("make", "fixture"), [(segmentation, "pairs"), (classification, "classes")])
def test_nothing_is_degraded_without_a_word(make, fixture, stage, request):
    source = request.getfixturevalue(fixture)
    with pytest.raises(UserError, match=r"image .*\.tif: it has 4 bands of uint16, and without --data.bands"):
        make(source).setup(stage)
    with pytest.raises(UserError, match=r"it has 4 bands of uint16, and no file says which .* --data.value_range="):
        make(source, bands=[1, 2, 3]).setup(stage)


@pytest.mark.parametrize(
    ("make", "off"),
    [
        (lambda **given: ClassificationData(augmentation=Augmentation(auto_augment="rand-m9"), **given), "null"),
        (lambda **given: ClassificationData(augmentation=Augmentation(color_jitter=0.3), **given), "0"),
        (SegmentationData, "false"),
    ],
)
def test_changes_of_colour_are_for_rgb_of_8_bits(make, off):
    with pytest.raises(
        UserError, match=rf"is defined for three channels of 8 bits .*set --data\.augmentation\.\w+={off}"
    ):
        make(**FOUR)
