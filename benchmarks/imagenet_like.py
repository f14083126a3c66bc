"""Makes a folder like ImageNet: real JPEG files of about 500x375 pixels, quality 90, in 20 classes that can be learned.

Usage: python benchmarks/imagenet_like.py FOLDER [--train 4000] [--val 1000] [--side 433] [--seed 0]

A class is a shape (one of 5) with a texture (one of 4) in shades of a hue of its own, as lemons are yellow; place,
size, shades, background and light vary. The same arguments make the same files. Sizes and aspects vary as photographs'
do: three in five are wide, one is tall, one any.
"""

import argparse
from colorsys import hsv_to_rgb
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

SHAPES = ("disc", "square", "triangle", "ring", "cross")
TEXTURES = ("stripes", "checks", "dots", "plain")
CLASSES = [f"{shape}_{texture}" for shape, texture in product(SHAPES, TEXTURES)]


def picture(label: int, rng: np.random.Generator, side: int) -> Image.Image:
    """One image of a class, of about `side` squared pixels."""
    shape, texture = CLASSES[label].split("_")
    aspect = (4 / 3, 4 / 3, 4 / 3, 3 / 4, rng.uniform(0.5, 2))[rng.integers(5)]
    scale = side * rng.uniform(0.85, 1.15)
    width, height = max(16, round(scale * aspect**0.5)), max(16, round(scale / aspect**0.5))
    pixels = clutter(rng, height, width) * 0.6 + 50
    pattern = surface(texture, rng, height, width)[..., None]  # (H, W, 1), 0 or 1
    hue = label / len(CLASSES) + rng.normal(scale=0.01)
    dark = colour(hue, rng.uniform(0.5, 1.0), rng.uniform(0.1, 0.5))
    light = colour(hue, rng.uniform(0.5, 1.0), rng.uniform(0.7, 1.0))
    object_ = pattern * light + (1 - pattern) * dark
    mask = np.asarray(outline(shape, rng, height, width), np.float32)[..., None] / 255
    pixels = pixels * (1 - mask) + object_ * mask
    pixels = pixels * rng.uniform(0.7, 1.2) + rng.normal(scale=6, size=pixels.shape)  # light, sensor noise
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def colour(hue: float, saturation: float, value: float) -> np.ndarray:
    """Red, green and blue, 0 to 255."""
    return 255 * np.array(hsv_to_rgb(hue % 1, saturation, value))


def clutter(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A background with structure at all scales, (H, W, 3), 0 to 255."""
    total = np.zeros((height, width, 3), np.float32)
    for cells, weight in ((3, 0.45), (12, 0.3), (48, 0.15), (150, 0.1)):
        noise = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        total += weight * np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    return total


def surface(texture: str, rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """A pattern of 0 and 1, (H, W), turned at random."""
    angle, period = rng.uniform(0, np.pi), rng.uniform(0.05, 0.08) * min(height, width)
    y, x = np.mgrid[:height, :width]
    u = (x * np.cos(angle) + y * np.sin(angle)) / period
    v = (y * np.cos(angle) - x * np.sin(angle)) / period
    if texture == "stripes":
        return (u % 1 < 0.5).astype(np.float32)
    if texture == "checks":
        return ((u % 1 < 0.5) ^ (v % 1 < 0.5)).astype(np.float32)
    if texture == "dots":
        return ((u % 1 - 0.5) ** 2 + (v % 1 - 0.5) ** 2 < 0.09).astype(np.float32)
    return np.ones((height, width), np.float32)


def outline(shape: str, rng: np.random.Generator, height: int, width: int) -> Image.Image:
    """A mask of the object, 0 to 255; it fills between a half and nine tenths of the shorter side."""
    mask = Image.new("L", (width, height))
    draw = ImageDraw.Draw(mask)
    r = rng.uniform(0.25, 0.45) * min(height, width)
    x, y = rng.uniform(r, width - r), rng.uniform(r, height - r)
    box = (x - r, y - r, x + r, y + r)
    if shape == "disc":
        draw.ellipse(box, fill=255)
    elif shape == "ring":
        draw.ellipse(box, outline=255, width=max(2, round(0.4 * r)))
    elif shape == "cross":
        draw.rectangle((x - r, y - 0.3 * r, x + r, y + 0.3 * r), fill=255)
        draw.rectangle((x - 0.3 * r, y - r, x + 0.3 * r, y + r), fill=255)
    else:
        sides = 4 if shape == "square" else 3
        draw.regular_polygon((x, y, r), sides, rotation=int(rng.integers(360)), fill=255)
    return mask


def make(root: Path, split: str, number: int, side: int, seed: int) -> None:
    """Writes image `number` of a split, unless it is there."""
    label = number % len(CLASSES)
    path = root / split / CLASSES[label] / f"{number:06}.jpg"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng([seed, split == "val", number])
        picture(label, rng, side).save(path, quality=90)


def main() -> None:
    """Reads the arguments and writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=4000, help="training images")
    parser.add_argument("--val", type=int, default=1000, help="validation images")
    parser.add_argument("--side", type=int, default=433, help="root of the mean number of pixels; 433 is 500x375")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        for split, count in (("train", args.train), ("val", args.val)):
            made = [pool.submit(make, args.folder, split, number, args.side, args.seed) for number in range(count)]
            for job in made:
                job.result()
    print(f"{args.train} + {args.val} images of {len(CLASSES)} classes: {args.folder}")


if __name__ == "__main__":
    main()
