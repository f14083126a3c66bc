"""Random crops against timm's, resizing and evaluation against PIL's and torchvision's."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision.transforms import Compose

from linvit.data.loading.seeds import generator
from linvit.data.transforms.geometry import Box, cover, cut, evaluation_view, random_box, resize
from tests.data.distributions import alike
from tests.data.transforms.test_pixel_ops import photograph, tensor

SIZES = [(375, 500), (500, 375), (200, 900)]


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


@pytest.mark.parametrize(("height", "width"), [(1, 1), (10, 2000), (2000, 10), (3, 5), (40, 40)])
def test_boxes_lie_within_the_image(height, width):
    for seed in range(300):
        top, left, h, w = random_box(generator(seed), height, width, (0.08, 1.0), (3 / 4, 4 / 3))
        assert 0 <= top <= top + h <= height
        assert 0 <= left <= left + w <= width
        assert min(h, w) >= 1


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
    ours = resize(cut(tensor(pixels), box), size, interpolation)
    assert ours.dtype == torch.uint8
    assert near(ours, theirs)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(31, 80), (80, 31), (31, 33), (90, 80)], ids=str)
def test_noise_is_resized_as_by_pil_if_the_rows_come_first(interpolation, size):
    """All of noise overshoots, so that the order of the passes shows: PIL's own choice depends on its version."""
    pixels = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    mode = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}[interpolation]
    theirs = Image.fromarray(pixels).resize((size[1], 50), mode).resize(size[::-1], mode)
    assert near(resize(tensor(pixels), size, interpolation), tensor(theirs))


def test_an_image_of_the_wanted_size_is_not_touched():
    image = tensor(photograph(8, 9))
    assert resize(image, (8, 9)) is image


@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0])
@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize(("height", "width"), [(75, 100), (100, 75), (80, 80), (61, 153)])
def test_evaluation_sees_what_timm_shows_of_a_pil_image(height, width, crop_mode, crop_pct):
    """The protocols of DeiT and Swin (center), of FLatten and of fine-tuning at 384 (squash), and timm's third."""
    transform = create_transform(
        (3, 48, 48),
        interpolation="bicubic",
        crop_mode=crop_mode,
        crop_pct=crop_pct,
        mean=(0.4, 0.5, 0.6),
        std=(1, 1, 1),
    )
    pixels = photograph(height, width)
    theirs = tensor(Compose(transform.transforms[:2])(Image.fromarray(pixels)))  # resizing and cropping alone
    ours = evaluation_view(tensor(pixels), (48, 48), crop_mode, crop_pct, (102, 128, 153))
    assert near(ours, theirs)


@pytest.mark.parametrize("target", [(224, 224), (256, 256), (100, 300), (300, 100)], ids=str)
def test_covering_keeps_the_aspect(target):
    for height, width in np.random.default_rng(0).integers(20, 900, (200, 2)).tolist():
        size = cover(height, width, target)
        assert size[0] >= target[0]
        assert size[1] >= target[1]
        assert size[0] == target[0] or size[1] == target[1]
        scale = max(target[0] / height, target[1] / width)
        assert size == pytest.approx((height * scale, width * scale), abs=1)
