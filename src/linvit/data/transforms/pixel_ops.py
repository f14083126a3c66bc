"""Changes of colour and sharpness of 8-bit images, with a separate amount for each image of a batch.

The same formulas serve one image in a loader process and a batch on the device; torchvision's take one amount for all
images of a batch, so those with an amount are written out here, as PIL rounds them.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as v2

Amount = Tensor | float
"""One number for all images, or (n, 1, 1, 1)."""


def posterize(images: Tensor, amount: Amount) -> Tensor:
    """Keeps the uppermost `amount` bits."""
    return images & torch.as_tensor(256 - 2.0 ** (8 - amount), device=images.device).to(torch.uint8)


def solarize(images: Tensor, amount: Amount) -> Tensor:
    """Inverts the values from `amount` (0 to 256) on."""
    bright = images >= torch.as_tensor(amount, dtype=torch.float32, device=images.device)
    return images ^ bright.to(torch.uint8).mul_(255)  # 255 - x is x with all bits flipped


def solarize_add(images: Tensor, amount: Amount) -> Tensor:
    """Adds `amount` (0 to 128) to values below 128."""
    added = torch.as_tensor(amount, device=images.device).to(torch.uint8)
    return images + (images < 128).to(torch.uint8).mul_(added)


def contrast(images: Tensor, amount: Amount) -> Tensor:
    """Blends between the mean grey (amount 0) and the image (amount 1), and extrapolates beyond."""
    return _blend((luma(images).mean((1, 2, 3), keepdim=True) + 0.5).floor_(), images, amount)


def color(images: Tensor, amount: Amount) -> Tensor:
    """Blends between shades of grey (amount 0) and the image (amount 1), and extrapolates beyond."""
    return _blend(luma(images), images, amount)


def sharpness(images: Tensor, amount: Amount) -> Tensor:
    """Blends between the image smoothed by (1 1 1; 1 5 1; 1 1 1) / 13 (0) and itself (1); the outermost pixels stay."""
    if min(images.shape[-2:]) < 3:
        return images
    inner = images[..., 1:-1, 1:-1]
    wide = images.to(torch.int16)
    box = wide[..., :-2, :] + wide[..., 1:-1, :] + wide[..., 2:, :]
    box = box[..., :-2] + box[..., 1:-1] + box[..., 2:]
    smooth = ((box + 4 * wide[..., 1:-1, 1:-1]).float() / 13 + 0.5).floor_()
    sharp = images.clone()
    sharp[..., 1:-1, 1:-1] = _blend(smooth, inner, amount)
    return sharp


def saturation(images: Tensor, amount: Amount) -> Tensor:
    """Multiplies the saturation of HSV, at most up to 1, by `amount`; hue and value stay.

    The value minus each channel is proportional to the saturation, so no hue is computed.
    """
    value = images.amax(-3, keepdim=True).float()
    span = value - images.amin(-3, keepdim=True)
    factor = (value / span.clamp_(min=1)).minimum(torch.as_tensor(amount, dtype=value.dtype, device=value.device))
    return to_8_bits((images - value).mul_(factor).add_(value + 0.5))


def hue(images: Tensor, amount: Amount) -> Tensor:
    """Turns the hue of HSV by `amount` degrees, from -60 to 60; saturation and value stay."""
    red, green, blue = images.float().split(1, -3)
    value = red.maximum(green).maximum(blue)
    span = value - red.minimum(green).minimum(blue)
    unit = span.clamp(min=1).mul_(6)
    # The place on the circle, from 0 to 1: the largest channel gives the third, the other two the place in it.
    place = torch.where(value == green, (blue - red).div_(unit).add_(1 / 3), (red - green).div_(unit).add_(2 / 3))
    place = torch.where(value == red, (green - blue).div_(unit), place).add_(amount / 360)
    value += 0.5  # rounds
    turned = []
    for start in (5, 3, 1):  # red, green, blue: how far each falls below the value
        fall = (place + (1 + start / 6)).frac_().sub_(1 / 3).abs_().mul_(-6).add_(2).clamp_(0, 1)
        turned.append(torch.addcmul(value, span, fall, value=-1))
    return to_8_bits(torch.cat(turned, -3))


def luma(images: Tensor) -> Tensor:
    """Returns the brightness (n, 1, H, W), whole numbers from 0 to 255, as PIL computes its mode L (ITU-R 601-2).

    PIL adds integers. float32 holds all of them exactly, and takes half the time.
    """
    red, green, blue = images.float().split(1, -3)
    weighted: Tensor = red.mul(19595).add_(green, alpha=38470).add_(blue, alpha=7471)
    return weighted.add_(32768).mul_(2**-16).floor_()


def to_8_bits(values: Tensor) -> Tensor:
    """Clamps floats to 0 to 255, in place, and truncates them to uint8; the way over int16 is faster on a CPU."""
    return values.clamp_(0, 255).to(torch.int16).to(torch.uint8)


def _blend(other: Tensor, images: Tensor, amount: Amount) -> Tensor:
    return to_8_bits((images - other).mul_(amount).add_(other))


OPERATIONS: dict[str, Callable[[Tensor, Amount], Tensor]] = {
    "invert": lambda images, _: 255 - images,
    "autocontrast": lambda images, _: v2.autocontrast(images),
    "equalize": lambda images, _: v2.equalize(images),
    "brightness": lambda images, factor: to_8_bits(images * factor),
    "shift": lambda images, levels: to_8_bits(images.float() + levels),
    "posterize": posterize,
    "solarize": solarize,
    "solarize_add": solarize_add,
    "contrast": contrast,
    "color": color,
    "sharpness": sharpness,
    "saturation": saturation,
    "hue": hue,
}
"""8-bit images (n, 3, H, W) and amounts to changed ones."""
