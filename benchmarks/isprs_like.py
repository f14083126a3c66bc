"""Makes pictures like those of ISPRS Vaihingen or Potsdam: IR-R-G, with colour-coded masks and eroded ones.

Usage: python benchmarks/isprs_like.py FOLDER [--set vaihingen] [--areas 8] [--side 700] [--seed 0]

FOLDER gets `top`, `gts` and `gts_eroded`, as `linvit data tile` takes them, of `--areas` training areas, that of
validation and three of the test set. A picture has streets with cars, houses, lawns and trees, and a little clutter.
The same arguments make the same files.
"""

import argparse
from pathlib import Path

import numpy as np
from imagenet_like import clutter
from PIL import Image, ImageFilter

from linvit.data.sources.tiles import BOUNDARY, ISPRS_COLOURS, SETS

STREET, BUILDING, LAWN, TREE, CAR, CLUTTER = range(6)
INFRARED = np.array([(90, 100, 105), (120, 130, 130), (190, 95, 90), (150, 50, 60), (70, 80, 120), (60, 45, 60)])
"""IR, R and G of the classes: plants reflect infrared."""
NAMES = {
    "vaihingen": ("top_mosaic_09cm_area{}", "top_mosaic_09cm_area{}", "top_mosaic_09cm_area{}_noBoundary"),
    "potsdam": ("top_potsdam_{}_IRRG", "top_potsdam_{}_label", "top_potsdam_{}_label_noBoundary"),
}
TRAINING = {
    "vaihingen": [str(i) for i in range(1, 39, 2)],
    "potsdam": [f"{i}_{j}" for i in range(2, 8) for j in (10, 11, 12)],
}


def scene(rng: np.random.Generator, side: int) -> tuple[Image.Image, np.ndarray]:
    """A picture of `side` squared pixels and its classes (H, W)."""
    y, x = np.mgrid[:side, :side].astype(np.float32)
    labels = np.full((side, side), LAWN, np.uint8)
    tint = rng.normal(0, 6, (side, side, 1))

    def box(cx: float, cy: float, length: float, width: float, angle: float) -> np.ndarray:
        dx, dy = x - cx, y - cy
        along, across = dx * np.cos(angle) + dy * np.sin(angle), dy * np.cos(angle) - dx * np.sin(angle)
        return (np.abs(along) < length / 2) & (np.abs(across) < width / 2)

    turn = rng.uniform(0, np.pi / 2)
    for angle in (turn, turn + np.pi / 2):
        for offset in np.arange(-side, side, rng.uniform(150, 220)):
            cx, cy = side / 2 - offset * np.sin(angle), side / 2 + offset * np.cos(angle)
            labels[box(cx, cy, 4 * side, 34, angle)] = STREET
            for place in rng.uniform(-side, side, side // 40):
                car = box(cx + place * np.cos(angle), cy + place * np.sin(angle), 22, 10, angle)
                labels[car] = CAR
                tint[car] += rng.uniform(-60, 90)
    for _ in range(side * side // 9000):
        cx, cy, roof = *rng.uniform(0, side, 2), rng.uniform(-45, 70)
        house = box(cx, cy, *rng.uniform(35, 90, 2), turn) & (labels == LAWN)
        labels[house] = BUILDING
        tint[house] += roof
    for _ in range(side * side // 5000):
        cx, cy, radius = *rng.uniform(0, side, 2), rng.uniform(8, 26)
        crown = ((x - cx) ** 2 + (y - cy) ** 2 < radius**2) & (labels != CAR) & (labels != BUILDING)
        labels[crown] = TREE
        tint[crown] += rng.normal(0, 22, (int(crown.sum()), 1)) + rng.uniform(-15, 15)
    for _ in range(max(side * side // 150000, 1)):
        cx, cy = rng.uniform(0, side, 2)
        labels[box(cx, cy, *rng.uniform(15, 40, 2), rng.uniform(0, np.pi))] = CLUTTER
    pixels = INFRARED[labels] + tint + (clutter(rng, side, side) - 128) * 0.12
    picture = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    return picture.filter(ImageFilter.GaussianBlur(0.8)), labels


def coloured(labels: np.ndarray, eroded: bool) -> Image.Image:
    """Classes as colours; if eroded, what lies within three pixels of another class is black."""
    colours = np.array(ISPRS_COLOURS, np.uint8)[labels]
    if eroded:
        numbers = Image.fromarray(labels)
        low, high = (np.asarray(numbers.filter(kind(7))) for kind in (ImageFilter.MinFilter, ImageFilter.MaxFilter))
        colours[low != high] = BOUNDARY
    return Image.fromarray(colours)


def make(folder: Path, name: str = "vaihingen", areas: int = 8, side: int = 700, seed: int = 0) -> None:
    """Writes the whole set."""
    chosen = [area for area in TRAINING[name] if area not in SETS[name].test | SETS[name].val][:areas]
    chosen += [*sorted(SETS[name].val), *sorted(SETS[name].test)[:3]]
    for number, area in enumerate(chosen):
        picture, labels = scene(np.random.default_rng([seed, number]), side)
        made = (picture, coloured(labels, eroded=False), coloured(labels, eroded=True))
        for kind, pattern, image in zip(("top", "gts", "gts_eroded"), NAMES[name], made, strict=True):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            image.save(folder / kind / f"{pattern.format(area)}.tif")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", choices=sorted(SETS), default="vaihingen")
    parser.add_argument("--areas", type=int, default=8, help="of training")
    parser.add_argument("--side", type=int, default=700, help="pixels")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make(given.folder, given.set, given.areas, given.side, given.seed)
