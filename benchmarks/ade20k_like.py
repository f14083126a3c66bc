"""Makes a folder like ADE20K: JPEG photos of about 683x512 pixels and PNG masks that count 150 classes from 1.

Usage: python benchmarks/ade20k_like.py FOLDER [--train 400] [--val 100] [--side 590] [--seed 0]

Each picture is a plane cut into regions, from walls that cover a third of it to things of a few hundred pixels. A class
has a colour and a stripe of its own, so that it can be learned, and classes are of unequal frequencies, as in ADE20K.
The same arguments make the same files.
"""

import argparse
from colorsys import hsv_to_rgb
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from imagenet_like import clutter
from PIL import Image

CLASSES = 150
SPLITS = ("training", "validation")


def pair(rng: np.random.Generator, side: int) -> tuple[Image.Image, Image.Image]:
    """A photo of about `side` squared pixels and its mask."""
    aspect = (4 / 3, 4 / 3, 4 / 3, 3 / 4, rng.uniform(0.5, 2))[rng.integers(5)]
    scale = side * rng.uniform(0.85, 1.3)
    height, width = round(scale / aspect**0.5), round(scale * aspect**0.5)
    y, x = np.mgrid[:height, :width].astype(np.float32)
    frequency = 1 / np.arange(1, CLASSES + 1)
    labels = np.zeros((height, width), np.uint8)
    count = int(rng.integers(6, 40))
    classes = 1 + rng.choice(CLASSES, count, p=frequency / frequency.sum())
    for label, size in zip(classes, np.sort(rng.uniform(0.02, 0.5, count) ** 1.5)[::-1], strict=True):
        angle, ratio, power = rng.uniform(0, np.pi), rng.uniform(0.4, 2.5), rng.choice([2, 8])  # ellipses and boxes
        dx, dy = x - rng.uniform(0, width), y - rng.uniform(0, height)
        u = (dx * np.cos(angle) + dy * np.sin(angle)) / (size * width)
        v = (dy * np.cos(angle) - dx * np.sin(angle)) / (size * width * ratio)
        labels[np.abs(u) ** power + np.abs(v) ** power < 0.5] = label
    colours = np.array([hsv_to_rgb(i * 0.618 % 1, 0.3 + i % 5 * 0.15, 0.3 + i % 7 * 0.1) for i in range(CLASSES + 1)])
    stripe = np.sin((x + (labels % 3) * y) * (0.1 + labels % 11 * 0.05))[..., None]
    pixels = 255 * colours[labels] * (1 + 0.15 * stripe) + (clutter(rng, height, width) - 128) * 0.4
    pixels = pixels * rng.uniform(0.8, 1.2) + rng.normal(0, 2, (height, width, 1))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)), Image.fromarray(labels)


def write(folder: Path, split: str, number: int, side: int, seed: int) -> None:
    """Writes one photo and its mask."""
    photo, mask = pair(np.random.default_rng([seed, SPLITS.index(split), number]), side)
    name = f"ADE_{split[:5]}_{number:08}"
    photo.save(folder / "images" / split / f"{name}.jpg", quality=80)
    mask.save(folder / "annotations" / split / f"{name}.png")


def make(folder: Path, train: int, val: int, side: int = 590, seed: int = 0) -> None:
    """Writes the whole set."""
    for kind in ("images", "annotations"):
        for split in SPLITS:
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        jobs = [
            pool.submit(write, folder, split, number, side, seed)
            for split, count in zip(SPLITS, (train, val), strict=True)
            for number in range(count)
        ]
        for job in jobs:
            job.result()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=400)
    parser.add_argument("--val", type=int, default=100)
    parser.add_argument("--side", type=int, default=590, help="square root of the mean number of pixels")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make(given.folder, given.train, given.val, given.side, given.seed)
