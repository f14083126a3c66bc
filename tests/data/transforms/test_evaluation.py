"""Evaluation against timm's, crop_mode by crop_mode."""

import numpy as np
import pytest
from PIL import Image
from timm.data import create_transform
from torchvision.transforms import Compose

from linvit.data.transforms.classification import cover, prepare
from tests.data.transforms.test_geometry import near
from tests.data.transforms.test_pixel_ops import photograph, tensor


@pytest.mark.parametrize("crop_pct", [0.875, 1.0])
@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize(("height", "width"), [(100, 75), (61, 153)])
def test_evaluation_sees_what_timm_shows_of_a_pil_image(height, width, crop_mode, crop_pct):
    """The protocols of DeiT and Swin (center), of FLatten and of fine-tuning at 384 (squash)."""
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
    assert near(prepare(tensor(pixels), (48, 48), crop_mode, crop_pct), theirs)


@pytest.mark.parametrize("target", [(224, 224), (256, 256), (100, 300), (300, 100)], ids=str)
def test_covering_keeps_the_aspect(target):
    for height, width in np.random.default_rng(0).integers(20, 900, (200, 2)).tolist():
        size = cover(height, width, target)
        assert size[0] >= target[0]
        assert size[1] >= target[1]
        assert size[0] == target[0] or size[1] == target[1]
        scale = max(target[0] / height, target[1] / width)
        assert size == pytest.approx((height * scale, width * scale), abs=1)
