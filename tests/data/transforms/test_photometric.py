"""Photometric distortion against the official program's pixels, and how often each change is drawn."""

from collections import Counter

import pytest
import torch

from linvit.data.loading.sampler import generator
from linvit.data.transforms import on_device
from linvit.data.transforms.geometry import PixelOp, apply
from linvit.data.transforms.segmentation import photometric_distortion
from tests.golden_files import load

GOLDEN = load("dense_pipe_photometric")


def replayed(decisions, values):
    """The operations that follow from the stored decisions, in the order in which they were drawn."""
    decisions, values, ops = list(decisions), list(values), []
    if decisions.pop(0):
        ops.append(PixelOp("shift", values.pop(0)))
    first = decisions.pop(0)
    if first and decisions.pop(0):
        ops.append(PixelOp("brightness", values.pop(0)))
    if decisions.pop(0):
        ops.append(PixelOp("saturation", values.pop(0)))
    if decisions.pop(0):
        ops.append(PixelOp("hue", 2.0 * decisions.pop(0)))
    if not first and decisions.pop(0):
        ops.append(PixelOp("brightness", values.pop(0)))
    assert not decisions
    assert not values
    return ops


@pytest.mark.parametrize("case", GOLDEN.constructor["cases"])
def test_the_pixels_are_the_official_ones(case):
    """Exact for brightness and contrast. OpenCV's HSV has 8 bits, and rounds where ours has floats."""
    image = GOLDEN.tensors["input.image"].permute(2, 0, 1)
    ops = replayed(*GOLDEN.constructor["cases"][case].values())
    done = apply(ops, {"image": image})["image"]
    off = (done.int() - GOLDEN.tensors[f"output.{case}"].permute(2, 0, 1).int()).abs()
    if {op.name for op in ops} <= {"shift", "brightness"}:
        assert off.max() == 0
    assert off.max() <= 6
    assert off.float().mean() <= 0.6


def test_a_batch_on_the_device_gets_the_same():
    images = torch.from_numpy(generator(0).integers(0, 256, (6, 3, 20, 30))).to(torch.uint8)
    images[0] = 77  # grey
    ops = [photometric_distortion(generator(seed)) for seed in range(6)]
    assert len({op.name for own in ops for op in own}) == 4
    done = on_device.apply_ops(images, ops)
    for image, own, batched in zip(images, ops, done, strict=True):
        off = (apply(own, {"image": image})["image"].int() - batched.int()).abs()  # by amounts of 64 or 32 bits
        assert off.max() <= 1
        assert (off > 0).float().mean() < 1e-3


def test_each_change_is_drawn_half_the_time():
    drawn = [photometric_distortion(generator(seed)) for seed in range(4000)]
    counts = Counter(op.name for own in drawn for op in own)
    for name in ("shift", "brightness", "saturation", "hue"):
        assert abs(counts[name] / 4000 - 0.5) < 0.04
    assert abs(sum(not own for own in drawn) / 4000 - 1 / 16) < 0.02
    hues = {op.amount / 2 for own in drawn for op in own if op.name == "hue"}
    assert hues == set(range(-18, 18))
    both = [[op.name for op in own] for own in drawn]
    both = [names for names in both if {"brightness", "hue"} <= {*names}]
    assert abs(sum(names.index("brightness") < names.index("hue") for names in both) / len(both) - 0.5) < 0.06
