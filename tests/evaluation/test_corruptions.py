"""Corruptions: what each does, and that nothing but row, name and severity decides it."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from linvit.data.loading.loader import make_loader
from linvit.data.loading.sampler import EvalSampler
from linvit.data.sources.images import collate
from linvit.evaluation.corruptions import ALEXNET, CORRUPTIONS, OF_THE_MCE, corrupt
from linvit.evaluation.sets import Variants


def image(height=33, width=40):
    """Smooth colours with an edge."""
    y, x = np.mgrid[:height, :width] / [[[height]], [[width]]]
    pixels = np.stack([x, y, (x > 0.5) * 0.8], -1) * 220 + 15
    return torch.from_numpy(pixels.astype(np.uint8)).permute(2, 0, 1)


def test_there_are_15_and_4():
    assert len(CORRUPTIONS) == 19
    assert OF_THE_MCE == [*CORRUPTIONS][:15] == [*ALEXNET]
    of_each_severity = [0.69528, 0.82542, 0.93554, 0.98138, 0.99452], [0.51002, 0.54718, 0.57294, 0.65458, 0.74778]
    for name, errors in zip(("gaussian_noise", "jpeg_compression"), of_each_severity, strict=True):
        assert ALEXNET[name] == pytest.approx(sum(errors) / 5)
    assert all(len(strengths) == 5 for _, *both in CORRUPTIONS.values() for strengths in both)


@pytest.mark.parametrize("size", [(33, 40), (100, 97)])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_changes_the_image_the_same_way_every_time(name, size):
    given = image(*size)
    found = [corrupt(given, name, severity, 3) for severity in (1, 5)]
    for each in found:
        assert each.dtype == torch.uint8
        assert each.shape == given.shape
    apart = [(each.float() - given).abs().mean() for each in found]
    assert apart[1] > max(apart[0], 0.05) or name in ("elastic_transform", "saturate", "spatter", "fog")
    assert torch.equal(found[1], corrupt(given, name, 5, 3))
    drawn = not torch.equal(found[1], corrupt(given, name, 5, 4))
    fixed = ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "gaussian_blur")
    assert drawn == (name not in (*fixed, "saturate"))


def test_some_by_hand():
    given = image()
    pixels = given.permute(1, 2, 0).numpy().astype(float)
    mean = pixels.mean((0, 1))
    close = {"atol": 1.01, "rtol": 0}  # cut off to 8 bits
    np.testing.assert_allclose(corrupt(given, "contrast", 2, 0).permute(1, 2, 0), (pixels - mean) * 0.5 + mean, **close)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "JPEG", quality=40)
    np.testing.assert_allclose(
        corrupt(given, "jpeg_compression", 5, 0).permute(1, 2, 0), np.asarray(Image.open(file)), **close
    )
    noise = (corrupt(torch.full((3, 64, 64), 128, dtype=torch.uint8), "gaussian_noise", 5, 0).float() - 128) / 255
    assert noise.std() == pytest.approx(0.1, rel=0.05)


class Pictures:
    """Four images, as a set has them."""

    def __len__(self):
        return 4

    def __getitem__(self, row):
        return {"image": image().roll(row, -1)}


def test_loader_processes_and_ranks_change_nothing():
    variants = Variants(Pictures(), [None, ("snow", 3), ("glass_blur", 5)])

    def read(workers, ranks):
        found = torch.zeros(4, 3, 3, 33, 40, dtype=torch.uint8)
        for rank in range(ranks):
            for batch in make_loader(variants, 2, workers, collate, EvalSampler(4, rank, ranks)):
                found[batch["index"]] = batch["image"]
        return found

    once = read(0, 1)
    assert torch.equal(once[1, 0], image().roll(1, -1))
    assert torch.equal(once[1, 1], corrupt(image().roll(1, -1), "snow", 3, 1))
    assert torch.equal(once, read(0, 2))
    assert torch.equal(once, read(1, 2))
