"""Random crops against timm's, resizing against PIL's, and masks and boxes that follow the image."""

import random
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision.transforms.v2 import functional as v2

from linvit.data.loading.sampler import generator
from linvit.data.transforms.geometry import (
    Box,
    apply,
    crop,
    pad,
    random_box,
    resize,
)
from linvit.ignore_index import IGNORE_INDEX
from tests.data.distributions import alike
from tests.data.transforms.test_pixel_ops import photograph, tensor
from tests.golden_files import load

SIZES = [(375, 500), (200, 900)]


@pytest.mark.parametrize(("height", "width"), SIZES, ids=str)
@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.5, 0.6)], ids=str)
def test_boxes_are_distributed_as_timm_s(height, width, scale):
    """Kolmogorov and Smirnov on area, aspect and centre of 3000 boxes each."""
    count, ratio = 3000, (3 / 4, 4 / 3)
    random.seed(0)
    image = Image.new("L", (width, height))
    theirs = [RandomResizedCropAndInterpolation.get_params(image, scale, ratio) for _ in range(count)]
    ours = [random_box(generator(seed), height, width, scale, ratio) for seed in range(count)]
    for fact in (
        lambda top, left, h, w: h * w,
        lambda top, left, h, w: w / h,
        lambda top, left, h, w: top + h / 2,
        lambda top, left, h, w: left + w / 2,
        lambda top, left, h, w: top / max(height - h, 1),
    ):
        assert alike([fact(*box) for box in ours], [fact(*box) for box in theirs])


@pytest.mark.parametrize(("height", "width"), [(10, 2000), (2000, 10), (40, 40)])
def test_where_no_box_fits_it_is_timm_s_fallback(height, width):
    scale, ratio = (1.0, 1.0), (1.2, 1.3)
    random.seed(0)
    theirs = RandomResizedCropAndInterpolation.get_params(Image.new("L", (width, height)), scale, ratio)
    assert random_box(generator(0), height, width, scale, ratio) == theirs


def near(ours, theirs):
    """Two levels at most, more than one hardly ever: each of two passes rounds weights and results its own way."""
    off = (ours.int() - theirs.int()).abs()
    return off.max() <= 2 and (off > 1).float().mean() <= 1e-3


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(24, 24), (50, 31), (120, 160)], ids=str)
def test_resizing_is_pil_s(interpolation, size):
    """Both resize rows, then columns, with 8 bits in between and weights of 16 (torch) or 22 bits (PIL)."""
    pixels = photograph(67, 89)
    mode = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}[interpolation]
    box = Box(5, 7, 50, 60)
    theirs = tensor(Image.fromarray(pixels).crop((7, 5, 67, 55)).resize(size[::-1], mode))
    ours = resize(crop(tensor(pixels), box), size, interpolation)
    assert ours.dtype == torch.uint8
    assert near(ours, theirs)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(31, 80), (80, 31)], ids=str)
def test_noise_is_resized_as_by_pil_if_the_rows_come_first(interpolation, size):
    """All of noise overshoots, so that the order of the passes shows: PIL's own choice depends on its version."""
    pixels = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    mode = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}[interpolation]
    theirs = Image.fromarray(pixels).resize((size[1], 50), mode).resize(size[::-1], mode)
    assert near(resize(tensor(pixels), size, interpolation), tensor(theirs))


HEIGHT, WIDTH = 61, 83
OPS = {
    "crop": partial(crop, box=Box(7, 12, 40, 55)),
    "crop through the box": partial(crop, box=Box(25, 30, 31, 50)),
    "resize": partial(resize, size=(97, 51), interpolation="bilinear"),
    "shrink without antialias": partial(resize, size=(31, 44), interpolation="bilinear", antialias=False),
    "flip": v2.horizontal_flip,
    "pad": partial(pad, right=7, bottom=11),
}


class TestTogether:
    """A white rectangle on black: the mask and the box lie where the white is, whatever is done."""

    def sample(self, top=19, left=23, bottom=45, right=52):
        image = torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8)
        image[:, top:bottom, left:right] = 255
        return {
            "image": image,
            "mask": (image[0] > 0).long(),
            "boxes": torch.tensor([[left, top, right, bottom]]).float(),
            "labels": torch.tensor([5]),
            "masks": (image[:1] > 0).to(torch.uint8),
            "id": "x",
        }

    @pytest.mark.parametrize("names", [*[[name] for name in OPS], ["flip", "crop", "resize", "pad"]], ids=str)
    def test_mask_and_box_follow_the_image(self, names):
        sample = self.sample()
        done = apply([OPS[name] for name in names], sample)
        white = done["image"][0] > 127
        assert white.any()
        assert done["mask"].shape == white.shape
        assert ((done["mask"] == 1) != white).float().mean() < 0.02  # OpenCV's nearest label lies half a pixel beside
        assert "pad" in names or torch.equal(done["masks"][0] == 1, done["mask"] == 1)
        (rows,), (columns,) = (white.any(axis).nonzero(as_tuple=True) for axis in (1, 0))
        around = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert done["boxes"][0].tolist() == pytest.approx([int(side) for side in around], abs=1.5)
        assert (done["labels"].tolist(), done["id"]) == ([5], "x")
        assert torch.equal(sample["mask"], self.sample()["mask"])  # what was given is left alone

    def test_what_comes_from_outside_has_no_class(self):
        done = apply([partial(pad, right=4, bottom=2)], self.sample())
        assert (done["mask"][:, -4:] == IGNORE_INDEX).all()
        assert (done["mask"][-2:] == IGNORE_INDEX).all()
        assert not done["image"][:, -2:].any()

    def test_boxes_that_leave_the_image_take_all_that_is_theirs_with_them(self):
        sample = self.sample()
        sample |= {
            "boxes": torch.tensor([[0, 0, 9, 9], [30, 30, 40, 40], [50, 2, 50, 9]]).float(),
            "labels": torch.tensor([1, 2, 3]),
            "iscrowd": torch.tensor([False, True, False]),
            "masks": torch.zeros(3, HEIGHT, WIDTH, dtype=torch.uint8),
        }
        done = apply([partial(crop, box=Box(10, 10, 40, 60)), v2.horizontal_flip], sample)
        assert (done["labels"].tolist(), done["iscrowd"].tolist(), len(done["masks"])) == ([2], [True], 1)
        assert len(done["boxes"]) == 1
        none = apply([partial(crop, box=Box(50, 0, 10, 10))], sample)
        assert (none["boxes"].shape, none["masks"].shape, none["labels"].shape) == ((0, 4), (0, 10, 10), (0,))
        ops = [OPS[name] for name in ("resize", "flip", "pad")]
        assert apply(ops, none)["boxes"].shape == (0, 4)


def opencv(*size):
    return partial(resize, size=size, interpolation="bilinear", antialias=False)


class TestDensePipelines:
    """Resizing, flipping and cropping of masks and boxes as the programs of detection and segmentation do it (mmcv)."""

    def test_boxes_and_masks(self):
        golden = load("dense_pipe_det_geometry")
        given = {name: golden.tensors[f"input.{name}"] for name in ("boxes", "labels", "masks")}
        given["image"] = torch.zeros(3, *given["masks"].shape[1:], dtype=torch.uint8)
        resized = apply([opencv(90, 120)], given)
        cropped = apply([partial(crop, box=Box(22, 30, 40, 51))], given)
        again = apply([opencv(70, 89)], cropped)
        results = {
            "resize": resized,
            "resize_flip": apply([v2.horizontal_flip], resized),
            "crop": cropped,
            "crop_resize": again,
        }
        for name, done in results.items():
            assert list(done["image"].shape[1:]) == golden.tensors[f"output.{name}_img_shape"].tolist()
            golden.check(f"output.{name}_boxes", done["boxes"])
            assert torch.equal(done["labels"], golden.tensors[f"output.{name}_labels"])
            assert torch.equal(done["masks"], golden.tensors[f"output.{name}_masks"])

    @pytest.mark.parametrize("size", ["up", "down", "down3"])
    def test_pixels_and_labels(self, size):
        tensors = load("dense_pipe_resize_pixels").tensors
        expected = tensors[f"output.image_{size}"].permute(2, 0, 1)
        done = apply(
            [opencv(*expected.shape[1:])],
            {"image": tensors["input.image"].permute(2, 0, 1), "mask": tensors["input.label"]},
        )
        assert (done["image"].int() - expected.int()).abs().max() <= 1
        assert torch.equal(done["mask"], tensors[f"output.label_{size}"])
