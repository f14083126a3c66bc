"""Random erasing against timm's."""

import random

import pytest
import torch
from timm.data.random_erasing import RandomErasing

from linvit.data.loading.sampler import generator
from linvit.data.transforms.geometry import Box
from linvit.data.transforms.on_device import BatchDeviceOps, DeviceOps, erased_box
from tests.data.distributions import alike, follows, independent

COUNT = 3000


def timms(size, probability):
    """Boxes that timm erases, read off the pixels."""
    random.seed(0)
    torch.manual_seed(0)
    erase = RandomErasing(probability, mode="pixel", device="cpu")
    boxes = []
    for _ in range(COUNT):
        hit = (erase(torch.full((1, *size), 1e6)) != 1e6)[0].nonzero()
        if len(hit):
            (top, left), (bottom, right) = hit.amin(0).tolist(), hit.amax(0).tolist()
            boxes.append(Box(top, left, bottom - top + 1, right - left + 1))
    return boxes


@pytest.mark.parametrize("size", [(64, 64), (48, 96)], ids=str)
def test_boxes_are_distributed_as_timm_s(size):
    """Kolmogorov and Smirnov on area, aspect and place; chi-squared on how many are erased at all."""
    drawn = [erased_box(generator(seed), 0.25, size) for seed in range(COUNT)]
    ours, theirs = [box for box in drawn if box], timms(size, 0.25)
    table = [[len(ours), COUNT - len(ours)], [len(theirs), COUNT - len(theirs)]]
    assert independent(table)
    for fact in (
        lambda box: box.height * box.width,
        lambda box: box.height / box.width,
        lambda box: box.top,
        lambda box: box.left,
    ):
        assert alike(list(map(fact, ours)), list(map(fact, theirs)))


@pytest.mark.parametrize(("probability", "erased"), [(0.0, 0), (1.0, 200)])
def test_never_and_always(probability, erased):
    assert sum(erased_box(generator(seed), probability, (32, 32)) is not None for seed in range(200)) == erased


def test_noise_fills_the_box_and_nothing_else_and_follows_from_the_seed():
    box = Box(3, 5, 40, 50)
    boxes, seeds = [box, None, box, box], [7, 8, 8, 7]
    images = torch.full((4, 3, 64, 64), 9.0)
    state = torch.get_rng_state()
    ops = [DeviceOps(seed, (), box) for seed, box in zip(seeds, boxes, strict=True)]
    assert BatchDeviceOps(ops).erase(images) is images
    assert torch.equal(state, torch.get_rng_state())
    noise = images[:, :, 3:43, 5:55]
    assert follows(noise[0].flatten(), lambda x: torch.special.ndtr(torch.as_tensor(x)).numpy())
    assert torch.equal(images[0], images[3])
    assert not torch.equal(images[0], images[2])
    assert (images[1] == 9).all()
    images[:, :, 3:43, 5:55] = 9
    assert (images == 9).all()
