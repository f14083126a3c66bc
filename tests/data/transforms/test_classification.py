"""What training and evaluation do to one image, and where its randomness comes from."""

import random

import numpy as np
import pytest
import torch

import linvit
from linvit.data.transforms import on_device
from linvit.data.transforms.classification import Augmentation, EvalTransform, TrainTransform
from linvit.data.transforms.geometry import Warp
from linvit.data.transforms.on_device import Normalisation
from tests.data.transforms.test_pixel_ops import photograph, tensor

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
NORMALISATION = Normalisation(MEAN, STD)
NONE = Augmentation(crop_scale=None, hflip=0)
RECIPE = Augmentation(auto_augment="rand-m9-mstd0.5-inc1", random_erasing=0.25, interpolation="random")
EVERYTHING = Augmentation(
    auto_augment="rand-p1", color_jitter=0.4, random_erasing=0.5, rotate=20, translate=0.2, zoom=0.2
)
AUGMENTATIONS = {
    "none": NONE,
    "geometric": Augmentation((0.3, 1), hflip=0.5, rotate=20, translate=0.2, zoom=0.2),
    "recipe": RECIPE,
    "everything": EVERYTHING,
}
each = pytest.mark.parametrize("augmentation", AUGMENTATIONS.values(), ids=AUGMENTATIONS)


def pixels(height, width, seed=0):
    return {"image": tensor(photograph(height, width, seed))}


@each
@pytest.mark.parametrize(("shape", "size"), [((50, 9), (8, 24)), ((1, 1), (16, 16))], ids=str)
def test_any_image_becomes_the_wanted_size_in_8_bits(augmentation, shape, size):
    train = TrainTransform(size, augmentation, MEAN)
    for sample in [train(pixels(*shape), seed) for seed in range(5)] + [
        EvalTransform(size, "center", 0.875)(pixels(*shape), 0)
    ]:
        assert sample["image"].shape == (3, *size)
        assert sample["image"].dtype == torch.uint8
        assert sample["image"].is_contiguous()


@each
def test_the_seed_decides_and_no_global_generator_does(augmentation):
    transform, image, results = TrainTransform((16, 16), augmentation, MEAN), pixels(40, 30), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        results.append([transform(image, seed) for seed in range(20)])
        assert torch.equal(before[0], torch.get_rng_state())
        assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())
    for first, second in zip(*results, strict=True):
        assert torch.equal(first["image"], second["image"])
        assert first["device_ops"] == second["device_ops"]
    if augmentation is not NONE:
        assert len({sample["image"].numpy().tobytes() for sample in results[0]}) > 10


class TestDevice:
    """`augment_on: device` draws the same and leaves the doing to the device."""

    @pytest.mark.parametrize("name", ["recipe", "everything"])
    def test_it_comes_to_the_same(self, name):
        """Bit for bit where nothing is interpolated between pixels, else as near as torch's and PIL's kernels are."""
        options = {**AUGMENTATIONS[name].__dict__, "interpolation": "bilinear"}
        worker, device = (
            TrainTransform((32, 32), Augmentation(**options | {"augment_on": on}), MEAN) for on in ("worker", "device")
        )
        for seed in range(60):
            now, later = worker(pixels(40, 30), seed), device(pixels(40, 30), seed)
            assert now["device_ops"].ops == ()
            assert now["device_ops"].erase == later["device_ops"].erase
            done = (
                on_device.apply_ops(later["image"][None], [later["device_ops"].ops])[0]
                if later["device_ops"].ops
                else later["image"]
            )
            if any(isinstance(op, Warp) for op in later["device_ops"].ops):
                continue  # a level of difference can become many in what follows; see test_operations
            assert torch.equal(done, now["image"])


def test_flips_are_half_of_all():
    transform, image = TrainTransform((8, 8), Augmentation(None), MEAN), pixels(8, 8)
    flipped = sum(torch.equal(transform(image, seed)["image"], image["image"].flip(-1)) for seed in range(1000))
    assert 450 < flipped < 550


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rotate": 10}, (10, 0, 1)),
        ({"translate": 0.2}, (0, 0.2, 1)),
        ({"zoom": 0.3}, (0, 0, 1.3)),
    ],
    ids=str,
)
def test_turns_shifts_and_zooms_stay_in_their_ranges_and_reach_the_ends(options, expected):
    """Read off the matrix: x' = (cos x - sin y) / zoom + ..."""
    transform = TrainTransform((100, 100), Augmentation(None, **options), MEAN)
    largest = np.zeros(3)
    for seed in range(300):
        (warp,) = transform._warp(np.random.default_rng(seed), (100, 100))
        a, b, c, d, e, f = warp.matrix
        zoom = 1 / np.hypot(a, b)
        angle = np.degrees(np.arctan2(-b, a))
        centre = np.linalg.solve([[a, b], [d, e]], [50 - c, 50 - f])  # where the middle went
        largest = np.maximum(largest, [abs(angle), np.abs(centre - 50).max() / 100, zoom])
        assert not warp.bicubic
        assert warp.fill == (0,)
    ends = np.array(expected)
    assert (largest <= ends + 0.005).all()
    assert (largest >= 0.95 * ends).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_scale": (0.0, 1.0)}, "crop_scale must be [low, high] with 0 < low <= high <= 1; got [0.0, 1.0]"),
        ({"crop_scale": (0.8, 0.2)}, "got [0.8, 0.2]"),
        ({"crop_scale": (0.2, 1.5)}, "got [0.2, 1.5]"),
        ({"hflip": 1.5}, "hflip must be a number at least 0 and at most 1; got 1.5"),
        ({"translate": -0.1}, "translate must be a number at least 0 and at most 1; got -0.1"),
        ({"zoom": 2}, "zoom must be a number at least 0 and below 1; got 2"),
        ({"rotate": -10}, "-10"),
        ({"zoom": 1.0}, "1.0"),  # a scale of 0
        ({"crop_ratio": (2.0, 1.0)}, "crop_ratio must be [low, high] with 0 < low <= high; got [2.0, 1.0]"),
        ({"interpolation": "cubic"}, "interpolation must be one of bicubic, bilinear, random; got 'cubic'"),
        ({"augment_on": "gpu"}, "augment_on must be one of worker, device; got 'gpu'"),
        ({"random_erasing": -0.25}, "random_erasing must be a number at least 0 and at most 1; got -0.25"),
        ({"color_jitter": -1.0}, "color_jitter must be a number at least 0; got -1.0"),
        ({"auto_augment": "randaug"}, "auto_augment must be null or RandAugment like rand-m9-mstd0.5-inc1"),
    ],
    ids=str,
)
def test_an_impossible_augmentation_is_a_user_error(options, message):
    with pytest.raises(linvit.UserError) as error:
        Augmentation(**options)
    assert message in str(error.value)


@pytest.mark.parametrize("batch", [(), (2,), (2, 5)], ids=str)
def test_undoing_normalisation_is_the_inverse(batch):
    image = pixels(10, 12)["image"]
    normal = NORMALISATION(image[None])[0].expand(*batch, -1, -1, -1)
    assert torch.allclose(NORMALISATION.undo(normal), (image / 255).expand_as(normal), atol=1e-6)
