"""Changes of colour and sharpness of 8-bit images, where each image of a batch has an amount of its own.

The same formulas serve one image in a loader process and a batch on the device; torchvision's take one amount for all
images of a batch, so those with an amount are written out here, as PIL rounds them.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as v2

Amount = Tensor | float
"""One number for all images, or (n, 1, 1, 1)."""


def invert(images: Tensor, amount: Amount) -> Tensor:
    """Inverts the colours; the amount does not matter."""
    return 255 - images


def autocontrast(images: Tensor, amount: Amount) -> Tensor:
    """Stretches each channel to 0 to 255; the amount does not matter."""
    return v2.autocontrast(images)  # type: ignore[no-any-return]


def equalize(images: Tensor, amount: Amount) -> Tensor:
    """Flattens the histogram of each channel; the amount does not matter."""
    return v2.equalize(images)  # type: ignore[no-any-return]


def grayscale(images: Tensor, amount: Amount) -> Tensor:
    """Turns colours into shades of grey; the amount does not matter."""
    return luma(images).to(torch.uint8).expand_as(images).contiguous()


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


def brightness(images: Tensor, amount: Amount) -> Tensor:
    """Blends between black (amount 0) and the image (amount 1), and extrapolates beyond."""
    return to_8_bits(images * amount)


def contrast(images: Tensor, amount: Amount) -> Tensor:
    """Blends between the mean grey (amount 0) and the image (amount 1), and extrapolates beyond."""
    mean = (luma(images).float().mean((1, 2, 3), keepdim=True) + 0.5).floor_()
    return _blend(mean, images, amount)


def color(images: Tensor, amount: Amount) -> Tensor:
    """Blends between shades of grey (amount 0) and the image (amount 1), and extrapolates beyond."""
    return _blend(luma(images).float(), images, amount)


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


def blur(images: Tensor, amount: Amount) -> Tensor:
    """Blurs by a Gaussian with a standard deviation of `amount` pixels, cut off at 6 pixels."""
    count, channels, height, width = images.shape
    sigma = torch.as_tensor(amount, device=images.device).expand(count, 1, 1, 1).repeat_interleave(channels, 0)
    reach = min(6, height - 1, width - 1)
    steps = torch.arange(-reach, reach + 1, device=images.device)
    bell = torch.exp(-0.5 * (steps / sigma) ** 2)  # (n*3, 1, 1, 2*reach + 1)
    bell = bell / bell.sum(-1, keepdim=True)
    planes = F.pad(images.float(), [reach] * 4, mode="reflect").flatten(0, 1)[None]  # (1, n*3, H, W)
    planes = F.conv2d(planes, bell, groups=count * channels)
    planes = F.conv2d(planes, bell.mT, groups=count * channels)
    return to_8_bits(planes.add_(0.5)).view_as(images)


def luma(images: Tensor) -> Tensor:
    """Returns the brightness (n, 1, H, W), 0 to 255 in int32, as PIL computes its mode L (ITU-R 601-2)."""
    red, green, blue = images.to(torch.int32).unbind(-3)
    return ((red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16).unsqueeze(-3)


def to_8_bits(values: Tensor) -> Tensor:
    """Clamps floats to 0 to 255, in place, and truncates them to uint8; the way over int16 is faster on a CPU."""
    return values.clamp_(0, 255).to(torch.int16).to(torch.uint8)


def _blend(other: Tensor, images: Tensor, amount: Amount) -> Tensor:
    return to_8_bits((images - other).mul_(amount).add_(other))


OPERATIONS: dict[str, Callable[[Tensor, Amount], Tensor]] = {
    operation.__name__: operation
    for operation in (
        *(invert, autocontrast, equalize, grayscale, posterize, solarize, solarize_add),
        *(brightness, contrast, color, sharpness, blur),
    )
}
