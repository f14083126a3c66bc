"""Affine maps against PIL's, and on images of one colour."""

import numpy as np
import pytest
import torch
from PIL import Image

from linvit.data.transforms import on_device
from linvit.data.transforms.geometry import Warp, affine_matrix
from tests.data.transforms.test_pixel_ops import FILL, photograph, tensor

HEIGHT, WIDTH = 37, 53
MATRICES = {
    "shear_x": (1, 0.213, -2.7, 0, 1, 0),
    "shear_y": (1, 0, 0, -0.171, 1, 3.3),
    "shift_x": (1, 0, 7.3718281, 0, 1, 0),
    "shift_y": (1, 0, 0, 0, 1, -5.6123457),
    "rotation": affine_matrix(23, 1, (0, 0), (HEIGHT, WIDTH)),
    "all": affine_matrix(-11, 1.23, (3, -2), (HEIGHT, WIDTH)),
}
each = pytest.mark.parametrize("matrix", MATRICES.values(), ids=MATRICES)
kernels = pytest.mark.parametrize("bicubic", [True, False], ids=["bicubic", "bilinear"])


def pil(pixels, matrix, mode, fill):
    size = (pixels.shape[1], pixels.shape[0])
    return np.array(Image.fromarray(pixels).transform(size, Image.Transform.AFFINE, matrix, mode, fillcolor=fill))


@each
@kernels
def test_pixels_are_pil_s(matrix, bicubic):
    pixels = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    for image in (pixels, photograph(HEIGHT, WIDTH)):
        mode = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
        assert torch.equal(Warp(matrix, bicubic, FILL)(tensor(image)), tensor(pil(image, matrix, mode, FILL)))


@each
@kernels
@pytest.mark.parametrize("device", [False, True])
def test_an_image_of_one_colour_stays_so(matrix, bicubic, device):
    """The weights of the neighbours sum to 1: no pixel is a level darker."""
    for level in range(0, 256, 5):
        image = torch.full((3, HEIGHT, WIDTH), level, dtype=torch.uint8)
        if device:
            moved = on_device.warp_batch(image[None], [matrix], bicubic, (level,) * 3)[0]
        else:
            moved = Warp(matrix, bicubic, (level,) * 3)(image)
        assert torch.equal(moved, image)


class TestAffine:
    """Turning, enlarging and shifting by one matrix."""

    def test_a_turn_is_pil_s(self):
        pixels = photograph(40, 56)
        turned = Image.fromarray(pixels).rotate(20, Image.Resampling.BILINEAR, fillcolor=FILL)
        done = Warp(affine_matrix(20, 1, (0, 0), (40, 56)), False, FILL)(tensor(pixels))
        assert torch.equal(done, tensor(turned))
