"""Tables on another grid, against interpolation by hand, and the grid of so many patches."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from linvit.attention.ops.functional import grid_from_count, resize_table
from tests.helpers import randn

SQUARE = partial(grid_from_count, img_size=(1, 1))


def by_hand(table, old, size, mode):
    plane = table.T.reshape(1, -1, *old)
    return F.interpolate(plane, size=size, mode=mode, align_corners=False).flatten(2)[0].T


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(24, 24), (10, 32), (3, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_the_grid_is_interpolated_and_the_prefix_stays(mode, size, prefix):
    given = randn(1, prefix + 196, 8).float()
    own = randn(1, prefix + math.prod(size), 8).float()
    got = resize_table(given, own, size, SQUARE, mode)
    assert got.shape == own.shape
    assert torch.equal(got[:, :prefix], given[:, :prefix])
    assert torch.allclose(got[0, prefix:], by_hand(given[0, prefix:], (14, 14), size, mode), atol=1e-5)
    flat = resize_table(given[0], own[0], size, SQUARE, mode)
    assert torch.equal(flat, got[0])


@pytest.mark.parametrize("image", [(224, 320), (320, 224), (56, 80)], ids=str)
def test_from_the_grid_of_an_image_that_is_not_square(image):
    old = (14, 20) if image[1] > image[0] else (20, 14)
    given, own = randn(1, 281, 4).float(), randn(1, 65, 4).float()
    got = resize_table(given, own, (8, 8), partial(grid_from_count, img_size=image))
    assert torch.allclose(got[0, 1:], by_hand(given[0, 1:], old, (8, 8), "bicubic"), atol=1e-5)


def test_the_same_grid_is_not_touched():
    given = randn(1, 197, 8)
    assert resize_table(given, randn(1, 197, 8), (14, 14), SQUARE) is given


def test_half_precision_is_interpolated_in_float32():
    given = randn(1, 49, 8).half()
    got = resize_table(given, torch.zeros(1, 64, 8), (8, 8), SQUARE)
    assert got.dtype == torch.float16
    assert torch.equal(got, resize_table(given.float(), torch.zeros(1, 64, 8), (8, 8), SQUARE).half())


@pytest.mark.parametrize(("there", "here"), [(1, 0), (2, 0), (0, 1), (0, 2), (1, 2), (2, 1)])
def test_a_class_token_more_or_less(there, here):
    given, own = randn(1, there + 49, 4).float(), randn(1, here + 49, 4, seed=1).float()
    got = resize_table(given, own, (7, 7), SQUARE)
    shared = min(there, here)
    assert torch.equal(got[:, :shared], given[:, :shared])
    assert torch.equal(got[:, shared:here], own[:, shared:here])
    assert torch.equal(got[:, here:], given[:, there:])


@pytest.mark.parametrize("shape", [(1, 8, 4), (1, 49, 5), (49, 4), (2, 49, 4), (49,), (), (1, 0, 4)], ids=str)
def test_what_does_not_fit_is_not_touched(shape):
    given = torch.ones(shape)
    assert resize_table(given, torch.ones(1, 64, 4), (8, 8), SQUARE) is given


def test_the_grid_of_an_image_is_found_from_the_number_of_its_patches():
    """For padded images (rounded up) and cropped ones (rounded down)."""
    for image in product(range(32, 641, 96), range(32, 641, 80)):
        for patch in (4, 8, 16, 32):
            for grid in {tuple(-(-side // patch) for side in image), tuple(side // patch for side in image)}:
                assert grid_from_count(math.prod(grid), image) == grid


@pytest.mark.parametrize(("count", "image"), [(12, (1, 1)), (0, (1, 1)), (-1, (1, 1)), (196, (112, 320)), (7, (2, 3))])
def test_a_number_of_patches_that_an_image_does_not_have(count, image):
    assert grid_from_count(count, image) is None
