"""Transforms: sizes, what evaluation keeps of an image, the checks of an augmentation."""

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

import linvit
from linvit.data.transforms import Augmentation, CoverCrop, denormalise, eval_transform, train_transform
from tests.data.images import picture

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
NONE = Augmentation(crop_scale=None, hflip=0)
STRONG = Augmentation(crop_scale=(0.3, 1), hflip=0.5, rotate=20, translate=0.2, zoom=0.2)


def pixels(image):
    """PIL image to a float tensor in [0, 1]."""
    return v2.functional.to_dtype(v2.functional.to_image(image), torch.float32, scale=True)


@pytest.mark.parametrize("size", [(16, 16), (8, 24), (24, 8)], ids=str)
@pytest.mark.parametrize("shape", [(12, 10), (50, 9), (9, 50), (1, 1)], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda size: eval_transform(size, 0.875, MEAN, STD),
        lambda size: train_transform(size, NONE, MEAN, STD),
        lambda size: train_transform(size, STRONG, MEAN, STD),
    ],
    ids=["eval", "plain", "strong"],
)
def test_any_image_becomes_the_wanted_size(make, shape, size):
    out = make(size)(picture(0, *shape))
    assert out.shape == (3, *size)
    assert out.dtype == torch.float32


def test_an_image_that_fits_is_only_normalised():
    image = picture(0, 12, 10)
    by_hand = (pixels(image) - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    for transform in (eval_transform((10, 12), 1.0, MEAN, STD), train_transform((10, 12), NONE, MEAN, STD)):
        assert torch.allclose(transform(image), by_hand, atol=1e-6)


@pytest.mark.parametrize("crop", [1.0, 0.875, 0.5])
@pytest.mark.parametrize(("width", "height"), [(60, 40), (40, 60), (200, 20)])
def test_evaluation_keeps_the_aspect_and_the_centre(width, height, crop):
    """A picture whose colour is its position: red across, green down."""
    image = Image.new("RGB", (width, height))
    places = ((x, y) for y in range(height) for x in range(width))
    image.putdata([(round(255 * (x + 0.5) / width), round(255 * (y + 0.5) / height), 0) for x, y in places])
    out = pixels(CoverCrop((20, 20), crop)(image))
    side = min(width, height) * 20 / (20 / crop // 1)  # of the square that is kept, in pixels of the image
    for channel, length in ((0, width), (1, height)):
        line = out[channel].mean(channel)  # along the axis in question
        centre, spread = line.mean().item(), (line[-3] - line[2]).item()  # away from the borders
        assert centre == pytest.approx(0.5, abs=0.03)
        assert spread == pytest.approx(15 / 20 * side / length, abs=0.03)


def test_no_augmentation_is_the_same_every_time_and_augmentation_is_not():
    image = picture(0, 40, 40)
    plain, strong = (train_transform((16, 16), augmentation, MEAN, STD) for augmentation in (NONE, STRONG))
    assert torch.equal(plain(image), plain(image))
    assert not torch.equal(strong(image), strong(image))


@pytest.mark.parametrize(
    ("augmentation", "named"),
    [
        (Augmentation(None, 1.0), v2.RandomHorizontalFlip),
        (Augmentation(None, 0, rotate=5), v2.RandomAffine),
        (Augmentation(None, 0, translate=0.1), v2.RandomAffine),
        (Augmentation(None, 0, zoom=0.1), v2.RandomAffine),
        (Augmentation((0.5, 1), 0), v2.RandomResizedCrop),
    ],
)
def test_each_option_brings_its_transform(augmentation, named):
    steps = train_transform((8, 8), augmentation, MEAN, STD).transforms
    random = [step for step in steps if type(step).__name__.startswith("Random")]
    assert [type(step) for step in random] == [named]


def test_a_certain_flip_flips():
    image = picture(0, 8, 8)
    flipped = train_transform((8, 8), Augmentation(None, 1.0), MEAN, STD)(image)
    assert torch.equal(flipped, train_transform((8, 8), NONE, MEAN, STD)(image).flip(-1))


def test_the_ranges_reach_the_affine_transform():
    affine = train_transform((8, 8), Augmentation(None, 0, rotate=7, translate=0.2, zoom=0.3), MEAN, STD).transforms[1]
    assert (affine.degrees, affine.translate, affine.scale) == ([-7, 7], (0.2, 0.2), (0.7, 1.3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_scale": (0.0, 1.0)}, "crop_scale must be [low, high] with 0 < low <= high <= 1; got [0.0, 1.0]"),
        ({"crop_scale": (0.8, 0.2)}, "got [0.8, 0.2]"),
        ({"crop_scale": (0.2, 1.5)}, "got [0.2, 1.5]"),
        ({"hflip": 1.5}, "hflip must lie between 0 and 1; got 1.5"),
        ({"translate": -0.1}, "translate must lie between 0 and 1; got -0.1"),
        ({"zoom": 2}, "zoom must be at least 0 and below 1; got 2"),
        ({"rotate": -10}, "-10"),
        ({"zoom": 1.0}, "1.0"),  # a scale of 0
    ],
    ids=str,
)
def test_an_impossible_augmentation_is_a_user_error(options, message):
    with pytest.raises(linvit.UserError) as error:
        Augmentation(**options)
    assert message in str(error.value)


@pytest.mark.parametrize("batch", [(), (2,), (2, 5)], ids=str)
def test_denormalise_is_the_inverse(batch):
    image = picture(0, 12, 10)
    normal = eval_transform((10, 12), 1.0, MEAN, STD)(image).expand(*batch, -1, -1, -1)
    assert torch.allclose(denormalise(normal, MEAN, STD), pixels(image).expand_as(normal), atol=1e-6)


def test_denormalise_stays_within_0_and_1():
    shown = denormalise(torch.randn(3, 4, 4) * 100, MEAN, STD)
    assert (shown.min(), shown.max()) == (0, 1)
