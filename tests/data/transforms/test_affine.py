"""Affine maps against PIL's, against the naive formula for boxes, and on images of one colour."""

import numpy as np
import pytest
import torch
from PIL import Image

from linvit.data.transforms import on_device
from linvit.data.transforms.geometry import Warp, affine_matrix, warp
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
        assert torch.equal(warp(tensor(image), matrix, bicubic, FILL), tensor(pil(image, matrix, mode, FILL)))


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
            moved = warp(image, matrix, bicubic, (level,) * 3)
        assert torch.equal(moved, image)


@each
def test_labels_are_pil_s_nearest(matrix):
    labels = np.random.default_rng(0).integers(0, 250, (HEIGHT, WIDTH), dtype=np.uint8)
    found = Warp(matrix, False, (0,)).mask(torch.from_numpy(labels), 255)
    theirs = pil(labels, matrix, Image.Resampling.NEAREST, 255)  # computed in fixed point numbers
    assert (found.numpy() != theirs).mean() <= 2e-3
    instances = torch.from_numpy(labels).long()[None].repeat(2, 1, 1)  # any type, any number
    of = Warp(matrix, False, (0,))
    assert torch.equal(of.mask(instances, 0)[1], of.mask(instances[1], 0))


@each
def test_boxes_hold_their_moved_corners(matrix):
    """Against the definition, corner by corner in float64: the matrix leads from the moved place back to the corner."""
    boxes = torch.rand(20, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 30
    boxes[:, 2:] += boxes[:, :2]
    a, b, c, d, e, f = matrix
    for box, found in zip(boxes.tolist(), Warp(matrix, False, (0,)).boxes(boxes, (10**6, 10**6)).tolist(), strict=True):
        corners = [(box[i], box[j]) for i in (0, 2) for j in (1, 3)]
        moved = np.array([np.linalg.solve([[a, b], [d, e]], [x - c, y - f]) for x, y in corners])
        within = np.clip([*moved.min(0), *moved.max(0)], 0, None)  # of the image
        assert found == pytest.approx(within, abs=1e-9)
    assert Warp(matrix, False, (0,)).boxes(torch.zeros(0, 4), (9, 9)).shape == (0, 4)


class TestAffine:
    """Turning, enlarging and shifting by one matrix."""

    def test_a_turn_is_pil_s(self):
        pixels = photograph(40, 56)
        turned = Image.fromarray(pixels).rotate(20, Image.Resampling.BILINEAR, fillcolor=FILL)
        done = warp(tensor(pixels), affine_matrix(20, 1, (0, 0), (40, 56)), False, FILL)
        assert torch.equal(done, tensor(turned))

    def test_a_shift_moves_right_and_down(self):
        image = tensor(photograph(10, 12))
        done = warp(image, affine_matrix(0, 1, (3, 2), (10, 12)), False, FILL)
        assert torch.equal(done[:, 2:, 3:], image[:, :-2, :-3])
        assert torch.equal(done[:, 0, 0], torch.tensor(FILL, dtype=torch.uint8))

    def test_zoom_enlarges_about_the_centre(self):
        image = torch.zeros(3, 40, 40, dtype=torch.uint8)
        image[:, 15:25, 15:25] = 255
        done = warp(image, affine_matrix(0, 2, (0, 0), (40, 40)), False, (0, 0, 0))
        assert (done[0] > 127).sum() == 20 * 20
        assert (done[0, 11:29, 11:29] == 255).all()
