"""ImageNet-C's corruptions, made while images are read (Hendrycks and Dietterich 2019, arXiv 1903.12261).

The formulas are those of the paper's program, and so are the strengths: from 96 pixels on those of ImageNet-C, for 224
pixels, and below those of CIFAR-10-C, for 32. As the published images of ImageNet-C were, large ones are saved as JPEG
of quality 85. Random numbers are others, so images are of the same kind, and not the published ones. Three differ more:

- frost is drawn (ridges of fractal noise, bluish); the paper pastes crops of six photographs.
- spatter's water has no shading of its rims, for which the paper uses OpenCV. It is not among the 15 of the mCE.
- motion blur is ImageMagick's in float instead of in 8 bits.
"""

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from linvit.data.loading.sampler import generator, sample_seed
from linvit.data.transforms.decode import open_image

Pixels = Any
"""Array of an image (H, W, 3), in [0, 1]; what is returned may lie outside."""
LARGE = 96  # pixels of the shorter side
SAVED = 85  # quality


def corrupt(image: Tensor, name: str, severity: int, row: int) -> Tensor:
    """An 8-bit image (3, H, W) with a corruption of severity 1 to 5; what is random follows from these and the row."""
    rng = generator(sample_seed(row, [*CORRUPTIONS].index(name), severity))
    pixels = image.permute(1, 2, 0).numpy() / 255.0
    change, *strengths = CORRUPTIONS[name]
    small = min(image.shape[1:]) < LARGE
    found = _eight_bits(change(pixels, strengths[small][severity - 1], rng))
    found = found if small else _jpeg(found, SAVED)
    return torch.from_numpy(found.copy()).permute(2, 0, 1).contiguous()


def _defocus_blur(x: Pixels, c: Sequence[float], rng: np.random.Generator) -> Pixels:
    """By a disk of a radius, whose rim is smoothed."""
    radius, rim = c
    reach, half = (8, 1) if radius <= 8 else (int(radius), 2)
    squares = np.arange(-reach, reach + 1) ** 2
    disk = (squares + squares[:, None] <= radius**2).astype(float)
    around = np.exp(-(np.arange(-half, half + 1) ** 2) / (2 * rim**2))
    disk = _filter(disk[..., None] / disk.sum(), np.outer(around, around) / around.sum() ** 2)[..., 0]
    return _filter(x, disk)


def _glass_blur(x: Pixels, c: Sequence[float], rng: np.random.Generator) -> Pixels:
    """Each pixel becomes one nearby, one after the other from the last on, between two Gaussian blurs."""
    sigma, reach, times = c[0], int(c[1]), int(c[2])
    x = _eight_bits(_gaussian(x, sigma)) / 255
    height, width = x.shape[:2]
    source = list(range(height * width))  # the pixel that is now at each place
    for _ in range(times):
        across, down = rng.integers(-reach, reach, (2, height, width)).tolist()
        for i in range(height - reach, reach, -1):
            for j in range(width - reach, reach, -1):
                source[i * width + j] = source[(i + down[i][j]) * width + j + across[i][j]]
    return _gaussian(x.reshape(-1, x.shape[2])[source].reshape(x.shape), sigma)


def _zoom_blur(x: Pixels, c: Sequence[float], rng: np.random.Generator) -> Pixels:
    """The mean of the image and of what it is at factors from 1 on."""
    factors = np.arange(1, *c)
    return (x + sum(_zoomed(x, factor) for factor in factors)) / (len(factors) + 1)


def _snow(x: Pixels, c: Sequence[float], rng: np.random.Generator) -> Pixels:
    """Blurred flakes, twice, and a whiter image."""
    mean, deviation, zoom, least, radius, sigma, kept = c
    flakes = _zoomed(rng.normal(mean, deviation, (*x.shape[:2], 1)), zoom)
    flakes = _motion(np.where(flakes < least, 0, flakes).clip(0, 1), radius, sigma, rng.uniform(-135, -45))
    grey = (x @ [0.299, 0.587, 0.114])[..., None]
    return kept * x + (1 - kept) * np.maximum(x, grey * 1.5 + 0.5) + flakes + flakes[::-1, ::-1]


def _frost(x: Pixels, c: Sequence[float], rng: np.random.Generator) -> Pixels:
    """Crystals in front of the image."""
    ridges = 1 - np.abs(2 * _plasma(x.shape, 1.7, rng) - 1)
    return c[0] * x + c[1] * ridges**2 * np.array([0.85, 0.95, 1.0])


def _elastic_transform(x: Pixels, c: Sequence[float], rng: np.random.Generator) -> Pixels:
    """A random affine map, then smooth random shifts."""
    shift, sigma, corners = c
    size = np.array(x.shape[1::-1])
    centre, square = size // 2, min(size) // 3
    before = centre + square * np.array([[1, 1], [1, -1], [-1, -1]])  # x, y of three corners
    after = before + rng.uniform(-corners, corners, before.shape)
    back = np.linalg.solve(np.column_stack([after, np.ones(3)]), before)
    grid = np.moveaxis(np.mgrid[: size[1], : size[0]][::-1], 0, -1).astype(float)  # (H, W, 2): x, y
    x = _sample(x, np.dstack([grid, np.ones(grid.shape[:2])]) @ back)
    moves = _gaussian(rng.uniform(-1, 1, grid.shape), sigma, 3, "symmetric") * shift
    return _sample(x, grid + moves)


def _pixelate(x: Pixels, c: float, rng: np.random.Generator) -> Pixels:
    """To a fraction of the size and back."""
    picture = Image.fromarray(_eight_bits(x))
    small = picture.resize([max(1, int(side * c)) for side in picture.size], Image.Resampling.BOX)
    return np.asarray(small.resize(picture.size, Image.Resampling.BOX)) / 255


def _spatter(x: Pixels, c: Sequence[float], rng: np.random.Generator) -> Pixels:
    """Drops of water or, of high severity, of mud."""
    mean, deviation, sigma, least, strength, mud = c
    drops = _gaussian(rng.normal(mean, deviation, (*x.shape[:2], 1)), sigma)
    drops = np.where(drops < least, 0, drops)
    if not mud:
        return x + strength * drops / max(drops.max(), 1e-9) * np.array([175, 238, 238]) / 255
    covered = _gaussian((drops > least).astype(float), strength)
    covered = np.where(covered < 0.8, 0, covered)
    return x * (1 - covered) + covered * np.array([63, 42, 20]) / 255


# fmt: off
CORRUPTIONS: dict[str, tuple[Callable[[Pixels, Any, np.random.Generator], Pixels], Sequence[Any], Sequence[Any]]] = {
    "gaussian_noise": (lambda x, c, rng: x + rng.normal(scale=c, size=x.shape),
        (0.08, 0.12, 0.18, 0.26, 0.38), (0.04, 0.06, 0.08, 0.09, 0.1)),
    "shot_noise": (lambda x, c, rng: rng.poisson(x * c) / c, (60, 25, 12, 5, 3), (500, 250, 100, 75, 50)),
    "impulse_noise": (lambda x, c, rng: np.where(rng.random(x.shape) <= c, rng.random(x.shape) <= 0.5, x),
        (0.03, 0.06, 0.09, 0.17, 0.27), (0.01, 0.02, 0.03, 0.05, 0.07)),
    "defocus_blur": (_defocus_blur, ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))),
    "glass_blur": (_glass_blur, ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))),
    "motion_blur": (lambda x, c, rng: _motion(x, c[0], c[1], rng.uniform(-45, 45)),
        ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)), ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))),
    "zoom_blur": (_zoom_blur, ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01))),
    "snow": (_snow, ((0.1, 0.3, 3, 0.5, 10, 4, 0.8), (0.2, 0.3, 2, 0.5, 12, 4, 0.7), (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65), (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55)),
        ((0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8))),
    "frost": (_frost, ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
        ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": (lambda x, c, rng: (x + c[0] * _plasma(x.shape, c[1], rng)) * x.max() / (x.max() + c[0]),
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)), ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))),
    "brightness": (lambda x, c, _: _in_hsv(x, 1, 0, c), (0.1, 0.2, 0.3, 0.4, 0.5), (0.05, 0.1, 0.15, 0.2, 0.3)),
    "contrast": (lambda x, c, _: (x - x.mean((0, 1))) * c + x.mean((0, 1)),
        (0.4, 0.3, 0.2, 0.1, 0.05), (0.75, 0.5, 0.4, 0.3, 0.15)),
    "elastic_transform": (_elastic_transform,
        ((488, 170.8, 24.4), (488, 19.52, 48.8), (12.2, 2.44, 4.88), (17.08, 2.44, 4.88), (29.28, 2.44, 4.88)),
        ((0, 0, 2.56), (1.6, 6.4, 2.24), (2.56, 1.92, 1.92), (3.2, 1.28, 1.6), (3.2, 0.96, 0.96))),
    "pixelate": (_pixelate, (0.6, 0.5, 0.4, 0.3, 0.25), (0.95, 0.9, 0.85, 0.75, 0.65)),
    "jpeg_compression": (lambda x, c, _: _jpeg(_eight_bits(x), c) / 255, (25, 18, 15, 10, 7), (80, 65, 58, 50, 40)),
    "speckle_noise": (lambda x, c, rng: x + x * rng.normal(scale=c, size=x.shape),
        (0.15, 0.2, 0.35, 0.45, 0.6), (0.06, 0.1, 0.12, 0.16, 0.2)),
    "gaussian_blur": (lambda x, c, _: _gaussian(x, c), (1, 2, 3, 4, 6), (0.4, 0.6, 0.7, 0.8, 1)),
    "spatter": (_spatter, ((0.65, 0.3, 4, 0.69, 0.6, 0), (0.65, 0.3, 3, 0.68, 0.6, 0), (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1), (0.67, 0.4, 1, 0.65, 1.5, 1)),
        ((0.62, 0.1, 0.7, 0.7, 0.5, 0), (0.65, 0.1, 0.8, 0.7, 0.5, 0), (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1), (0.65, 0.1, 0.5, 0.68, 0.6, 1))),
    "saturate": (lambda x, c, _: _in_hsv(x, c[0], c[1], 0), ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
        ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))),
}
# fmt: on
"""What changes pixels, and the strength of each severity for large and for small images."""
OF_THE_MCE = [*CORRUPTIONS][:15]
_ERRORS = (
    *(0.886428, 0.894468, 0.92264, 0.81988, 0.826268, 0.785948, 0.79836, 0.866816),
    *(0.826572, 0.819324, 0.564592, 0.853204, 0.646056, 0.71784, 0.6065),
)
ALEXNET = dict(zip(OF_THE_MCE, _ERRORS, strict=True))
"""AlexNet's published errors on ImageNet-C, the mean over the severities."""


def _eight_bits(x: Pixels) -> Any:
    return (x.clip(0, 1) * 255 + 1e-6).astype(np.uint8)  # cut off, as in the paper, but for what is rounding


def _jpeg(pixels: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    with open_image(file.getvalue()) as picture:
        return np.asarray(picture)


def _in_hsv(x: Pixels, scale: float, saturation: float, value: float) -> Pixels:
    """Scales the saturation, and adds to it and to the value, of hue, saturation and value."""
    hue, own, light = np.moveaxis(rgb_to_hsv(x), -1, 0)
    changed = np.dstack([hue, (own * scale + saturation).clip(0, 1), (light + value).clip(0, 1)])
    return np.asarray(hsv_to_rgb(changed))


def _gaussian(x: np.ndarray, sigma: float, truncate: float = 4, mode: Any = "edge") -> np.ndarray:
    reach = int(truncate * sigma + 0.5)
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * max(sigma, 1e-9) ** 2))
    for axis in (0, 1):
        pads = [(reach, reach) if each == axis else (0, 0) for each in range(3)]
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, pads, mode), 2 * reach + 1, axis)
        x = windows @ (weights / weights.sum())
    return x


def _filter(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Correlates each channel of (H, W, C) with a kernel (K, K), K odd."""
    reach = len(kernel) // 2
    padded = np.pad(x, [(reach, reach), (reach, reach), (0, 0)], "reflect")
    channels = torch.from_numpy(padded).permute(2, 0, 1)[:, None].float()  # in float64 it takes thirty times as long
    return F.conv2d(channels, torch.from_numpy(kernel)[None, None].float())[:, 0].permute(1, 2, 0).numpy()


def _motion(x: np.ndarray, radius: float, sigma: float, angle: float) -> np.ndarray:
    """A mean along a line from each pixel, with half a Gaussian as weights."""
    width = 2 * int(np.ceil(radius)) + 1
    weights = np.exp(-(np.arange(width) ** 2) / (2 * sigma**2))
    padded, total = np.pad(x, [(width, width), (width, width), (0, 0)], "edge"), np.zeros_like(x)
    for i, weight in enumerate(weights / weights.sum()):
        right = width + int(np.ceil(i * np.cos(np.deg2rad(angle)) - 0.5))
        down = width + int(np.ceil(i * np.sin(np.deg2rad(angle)) - 0.5))
        total += weight * padded[down : down + x.shape[0], right : right + x.shape[1]]
    return total


def _zoomed(x: np.ndarray, factor: float) -> Any:
    """The centre of (H, W, C), enlarged to the same size."""
    height, width = x.shape[:2]
    inner = [int(np.ceil(side / factor)) for side in (height, width)]
    top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
    cut = torch.from_numpy(x[top : top + inner[0], left : left + inner[1]]).permute(2, 0, 1)[None]
    size = [max(side, round(part * factor)) for side, part in zip((height, width), inner, strict=True)]
    large = F.interpolate(cut, size, mode="bilinear", align_corners=True)[0].permute(1, 2, 0).numpy()
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return np.asarray(large[top : top + height, left : left + width])


def _plasma(shape: Sequence[int], decay: float, rng: np.random.Generator) -> Any:
    """Fractal noise (H, W, 1) in [0, 1] of the diamond-square algorithm, on a torus of the next power of two."""
    side = 1 << (max(shape[:2]) - 1).bit_length()
    noise, step, wibble = np.zeros((side, side)), side, 100.0

    def middle(total: np.ndarray) -> np.ndarray:
        return np.asarray(total / 4 + wibble * rng.uniform(-wibble, wibble, total.shape))

    while step >= 2:
        half = step // 2
        corners = noise[::step, ::step]
        rows = corners + np.roll(corners, -1, 0)
        noise[half::step, half::step] = middle(rows + np.roll(rows, -1, 1))
        centres = noise[half::step, half::step]
        noise[::step, half::step] = middle(centres + np.roll(centres, 1, 0) + corners + np.roll(corners, -1, 1))
        noise[half::step, ::step] = middle(centres + np.roll(centres, 1, 1) + corners + np.roll(corners, -1, 0))
        step, wibble = half, wibble / decay
    noise -= noise.min()
    return (noise / noise.max())[: shape[0], : shape[1], None]


def _sample(x: np.ndarray, places: np.ndarray) -> np.ndarray:
    """(H, W, C) at places (H, W, 2), x and y, bilinearly; beyond the rim it is mirrored."""
    scaled = torch.from_numpy(2 * places / (np.array(x.shape[1::-1]) - 1) - 1)[None]
    image = torch.from_numpy(x).permute(2, 0, 1)[None]
    found = F.grid_sample(image, scaled, mode="bilinear", padding_mode="reflection", align_corners=True)
    return found[0].permute(1, 2, 0).numpy()
