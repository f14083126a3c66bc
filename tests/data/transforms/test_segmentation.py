"""Sizes, crops and padding as the official programs have them, and masks that follow their images."""

import numpy as np
import pytest
import torch
from PIL import Image

from linvit.data.sources.images import collate
from linvit.data.transforms import segmentation
from linvit.data.transforms.geometry import Box, crop
from linvit.data.transforms.on_device import Normalisation
from linvit.data.transforms.segmentation import (
    EvalTransform,
    SegmentationAugmentation,
    TrainTransform,
    is_varied,
    within,
)
from linvit.errors import UserError
from linvit.ignore_index import IGNORE_INDEX
from tests.golden_files import load

STILL = SegmentationAugmentation(ratio=(1, 1), max_class_ratio=None, hflip=0, photometric=False)


def half_white(height, width):
    """An image whose right half is white, of class 1."""
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    image[:, :, width // 2 :] = 255
    return {"image": image, "mask": (image[0] > 0).to(torch.uint8)}


class TestOfficial:
    def test_sizes(self):
        tensors = load("dense_pipe_shapes").tensors
        sizes = tensors["input.image_hw"].tolist()
        limits = (int(2048 * 0.7351), int(512 * 0.7351))
        for index, (height, width) in enumerate(sizes):
            aligned = EvalTransform((2048, 512), 32).sizes(height, width)
            assert list(aligned[0]) == tensors["output.ade_test"][index].tolist()
            assert list(aligned[1]) == tensors["output.ade_test_aligned"][index].tolist()
            assert list(within(height, width, limits)) == tensors["output.ade_train_ratio_0p7351"][index].tolist()

    def test_which_crops_are_taken(self, monkeypatch):
        golden = load("dense_pipe_crop")
        label, boxes = golden.tensors["input.label"], golden.tensors["input.boxes_y1y2x1x2"].tolist()
        limit = golden.constructor["cat_max_ratio"]
        assert golden.constructor["ignore_index"] == IGNORE_INDEX
        accepted = golden.tensors["output.accepted"].bool().tolist()
        for (top, bottom, left, right), expected in zip(boxes, accepted, strict=True):
            assert is_varied(crop(label, Box(top, left, bottom - top, right - left)), limit) == expected
        augmentation = SegmentationAugmentation(max_class_ratio=limit)
        transform = TrainTransform(tuple(golden.constructor["crop_size"]), None, augmentation)
        used = []
        for good in (0, 4, 9, 10, None):  # the draw that is acceptable
            draws = iter(range(12))
            monkeypatch.setattr(segmentation, "is_varied", lambda mask, limit, d=draws, g=good: next(d) == g)
            transform._box(np.random.default_rng(0), label)
            used.append(next(draws))  # as many were checked
        official = golden.tensors["output.draw_used"].tolist()
        assert [min(count - 1, 10) for count in used[:3]] == official[:3]
        assert official[3:] == [10, 10]
        assert used[3:] == [11, 11]

    def test_a_check_comes_before_ten_more_draws_and_none_after(self):
        """The eleventh crop is taken unchecked, so a mask of one class ends after eleven draws."""
        label = torch.zeros(40, 40, dtype=torch.uint8)
        rng = np.random.default_rng(0)
        TrainTransform((24, 24), None, SegmentationAugmentation())._box(rng, label)
        other = np.random.default_rng(0)
        for _ in range(22):
            other.integers(17)
        assert rng.integers(1000) == other.integers(1000)


class TestTraining:
    @pytest.mark.parametrize("limits", [None, (256, 64)])
    def test_the_mask_follows_the_image(self, limits):
        transform = TrainTransform((48, 56), limits, SegmentationAugmentation(photometric=False))
        flipped = 0
        for seed in range(30):
            done = transform(half_white(60, 90), seed)
            assert done["image"].shape == (3, 48, 56)
            assert done["mask"].shape == (48, 56)
            assert done["image"].is_contiguous()
            inside = done["mask"] != IGNORE_INDEX
            wrong = ((done["image"][0] > 127) != (done["mask"] == 1))[inside]
            assert wrong.float().mean() < 0.06
            height, width = done["device_ops"].inside
            assert inside.sum() == height * width
            flipped += bool(done["mask"][0, 0] == 1)
        assert 3 < flipped < 27

    def test_what_is_padded_is_the_mean_colour_and_ignored(self):
        done = TrainTransform((32, 40), None, STILL)(half_white(20, 30), 0)
        assert (done["mask"][20:] == IGNORE_INDEX).all()
        assert (done["mask"][:, 30:] == IGNORE_INDEX).all()
        assert (done["mask"][:20, :30] != IGNORE_INDEX).all()
        batch = collate([done | {"id": "x"}])
        image = batch["device_ops"].clear_padding(Normalisation([0.3, 0.4, 0.5], [1, 1, 1])(batch["image"]))
        assert not image[:, :, 20:].any()
        assert not image[:, :, :, 30:].any()
        assert (image[:, :, :20, :30] != 0).all()

    def test_factors_from_a_list_and_pils_bicubic_resizing(self):
        given = SegmentationAugmentation(
            ratios=[0.5, 1.5], interpolation="bicubic", max_class_ratio=None, hflip=0, photometric=False
        )
        noise = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
        sample = {"image": torch.from_numpy(noise).permute(2, 0, 1), "mask": torch.zeros(20, 30, dtype=torch.uint8)}
        drawn = set()
        for seed in range(20):
            done = TrainTransform((30, 45), None, given)(sample, seed)
            height, width = done["device_ops"].inside
            drawn.add(height)
            wanted = np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC), np.float32)
            off = (done["image"][:, :height, :width] - torch.from_numpy(wanted).permute(2, 0, 1)).abs()
            assert off.max() <= 2  # of 255, where roundings of rows and columns meet
            assert off.mean() < 0.1
        assert drawn == {10, 30}

    def test_colours_may_be_left_to_the_device(self):
        options = {"ratio": (1, 1), "hflip": 0, "max_class_ratio": None}
        sample = half_white(20, 20)
        worker = TrainTransform((20, 20), None, SegmentationAugmentation(**options))(sample, 3)
        device = TrainTransform((20, 20), None, SegmentationAugmentation(augment_on="device", **options))(sample, 3)
        assert torch.equal(device["image"], sample["image"])
        assert not torch.equal(worker["image"], sample["image"])
        assert device["device_ops"].ops
        assert not worker["device_ops"].ops


class TestEvaluation:
    def test_the_mask_keeps_its_size(self):
        done = EvalTransform((256, 64), 32)(half_white(100, 150), 0)
        assert done["image"].shape == (3, 64, 96)
        assert done["mask"].shape == (100, 150)
        assert done["size"] == (100, 150)


@pytest.mark.parametrize(
    "options",
    [
        {"ratio": (0, 1)},
        {"ratio": (2, 1)},
        {"ratios": []},
        {"ratios": [0.5, 0.0]},
        {"interpolation": "random"},
        {"max_class_ratio": 0.0},
        {"hflip": 2},
        {"augment_on": "gpu"},
    ],
    ids=str,
)
def test_options_are_checked(options):
    with pytest.raises(UserError, match=next(iter(options))):
        SegmentationAugmentation(**options)
