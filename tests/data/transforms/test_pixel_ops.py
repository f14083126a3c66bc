"""Every operation of RandAugment against timm's at the same magnitude, on the CPU and as a batch on the device."""

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment

from linvit.data.transforms import on_device
from linvit.data.transforms.geometry import PixelOp, Warp, apply
from linvit.data.transforms.rand_augment import OPERATIONS, as_op

TIMM = {
    "autocontrast": "AutoContrast",
    "equalize": "Equalize",
    "invert": "Invert",
    "rotate": "Rotate",
    "posterize": "Posterize",
    "solarize": "Solarize",
    "solarize_add": "SolarizeAdd",
    "color": "Color",
    "contrast": "Contrast",
    "brightness": "Brightness",
    "sharpness": "Sharpness",
    "shear_x": "ShearX",
    "shear_y": "ShearY",
    "translate_x": "TranslateXRel",
    "translate_y": "TranslateYRel",
}
FACTORS, MOVES = (0.1, 0.55, 1.0, 1.9), (-0.3, -0.27, 0.0, 0.1234, 0.45)
AMOUNTS = {
    "rotate": (-30.0, 0.0, 13.3, 27.0),
    "posterize": (1, 2, 4),
    "solarize": (0, 26, 256),
    "solarize_add": (0, 99, 110),
    **dict.fromkeys(("color", "contrast", "brightness", "sharpness"), FACTORS),
    **dict.fromkeys(("shear_x", "shear_y", "translate_x", "translate_y"), MOVES),
}
CASES = [(name, amount) for name in OPERATIONS for amount in AMOUNTS.get(name, (0,))]
MOVING = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
FILL = (124, 116, 104)


def photograph(height, width, seed=1):
    """Smooth colours with grain: neither flat nor mere noise."""
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    return (np.asarray(smooth) + rng.normal(scale=8, size=(height, width, 3))).clip(0, 255).astype(np.uint8)


def tensor(pixels):
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous()


def by_timm(pixels, name, amount, bicubic):
    arguments = () if name in ("autocontrast", "equalize", "invert") else (amount,)
    mode = Image.Resampling.BICUBIC if bicubic else Image.Resampling.BILINEAR
    done = auto_augment.NAME_TO_OP[TIMM[name]](Image.fromarray(pixels), *arguments, fillcolor=FILL, resample=mode)
    return tensor(done).int()


def test_all_of_timm_s_operations_are_here():
    names = {name.removesuffix("Increasing") for name in auto_augment._RAND_INCREASING_TRANSFORMS}
    assert {TIMM[name] for name in OPERATIONS} == names
    assert len(OPERATIONS) == len(set(OPERATIONS)) == 15


@pytest.mark.parametrize(
    ("name", "amount", "bicubic"),
    [(name, amount, bicubic) for name, amount in CASES for bicubic in ((False, True) if name in MOVING else (False,))],
)
def test_one_image_is_what_timm_makes_of_it(name, amount, bicubic):
    """Bit for bit; rotations within one level, since PIL rounds their matrix."""
    pixels = photograph(37, 53)
    done = as_op(name, amount, (37, 53), bicubic, FILL)(tensor(pixels))
    off = (done.int() - by_timm(pixels, name, amount, bicubic)).abs()
    assert off.max() <= (name == "rotate")
    assert (off > 0).float().mean() <= 0.1


@pytest.mark.parametrize("bicubic", [True, False], ids=["bicubic", "bilinear"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_batch_on_the_device_is_what_timm_makes_of_each_image(name, bicubic):
    """Within one level; bicubic moves, where torch's kernel (a = -0.75) is not PIL's (a = -1), within 3 on average."""
    amounts = AMOUNTS.get(name, (0, 0))
    pictures = [photograph(40, 56, seed) for seed in range(len(amounts))]
    ops = [[as_op(name, amount, (40, 56), bicubic, FILL)] for amount in amounts]
    done = on_device.apply_ops(torch.stack([tensor(pixels) for pixels in pictures]), ops)
    for image, pixels, amount in zip(done, pictures, amounts, strict=True):
        off = (image.int() - by_timm(pixels, name, amount, bicubic)).abs().float()
        if name in MOVING and bicubic:
            assert off.mean() < 3
        else:
            assert off.quantile(0.999) <= (1 if name in MOVING else 0)  # a pixel at the border may be in or out


def test_no_bits_at_all_are_black():
    """timm asks for that at the largest magnitude; Pillow used to give black and now refuses."""
    done = PixelOp("posterize", 0)(tensor(photograph(8, 8)))
    assert not done.any()


def test_operations_follow_one_another_each_image_its_own():
    images = torch.stack([tensor(photograph(24, 24, seed)) for seed in range(4)])
    ops = [
        [PixelOp("invert", 0), PixelOp("posterize", 3)],
        [],
        [PixelOp("brightness", 0.5)],
        [PixelOp("color", 0.2), PixelOp("invert", 0)],
    ]
    before = images.clone()
    done = on_device.apply_ops(images, ops)
    for image, own, found in zip(before, ops, done, strict=True):
        assert torch.equal(apply(own, {"image": image})["image"], found)
    assert torch.equal(images, before)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("size", [(1, 1), (2, 5)], ids=str)
def test_tiny_images(name, size):
    image = tensor(photograph(*size))
    op = as_op(name, 1, size, True, FILL)
    assert op(image).shape == image.shape
    assert on_device.apply_ops(image[None], [[op]])[0].shape == image.shape


@pytest.mark.parametrize("far", [-500.0, 500.0])
@pytest.mark.parametrize("vertical", [False, True])
def test_what_moves_out_of_sight_leaves_the_fill(far, vertical):
    matrix = (1, 0, 0, 0, 1, far) if vertical else (1, 0, far, 0, 1, 0)
    for done in (
        Warp(matrix, True, FILL)(tensor(photograph(9, 7))),
        on_device.apply_ops(tensor(photograph(9, 7))[None], [[Warp(matrix, True, FILL)]])[0],
    ):
        assert torch.equal(done, torch.tensor(FILL, dtype=torch.uint8).view(3, 1, 1).expand(3, 9, 7))
