"""Makes a small folder like COCO: JPEG photos of odd sizes and annotations/instances_{train,val}2017.json.

Usage: python benchmarks/coco_like.py FOLDER [--train 200] [--val 50] [--side 540] [--seed 0]

The photos are scenes of real handwritten digits. Their masks are polygons, of one part or two, and run-length
encodings, compressed and not; there are crowds, and photos without any digit. Category ids are 1, 4, 7, ..., 28 and not
in the order of the file. The same arguments make the same files.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from linvit.data.sources.scenes import Scenes, scene
from linvit.io import coco_masks

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
CATEGORIES = [{"id": 3 * digit + 1, "name": name} for digit, name in enumerate(NAMES)][::-1]
ASPECTS = (4 / 3, 4 / 3, 3 / 4, 1.0, 1.5, 2 / 3)


def outline(mask: np.ndarray, parts: int) -> list[list[float]]:
    """Polygons around the rows of a mask (H, W), of so many parts from top to bottom."""
    polygons = []
    rows = np.flatnonzero(mask.any(1))
    for part in np.array_split(rows, min(parts, len(rows))):
        left, right = mask[part].argmax(1), mask.shape[1] - mask[part, ::-1].argmax(1)
        left, right, part = (np.append(side, side[-1]).astype(float) for side in (left, right, part))
        part[-1] += 1  # down to the lower edge of the last row
        corners = np.concatenate([np.stack([left, part], 1), np.stack([right, part], 1)[::-1]])
        polygons.append(corners.ravel().tolist())
    return polygons


def segmentation(rng: np.random.Generator, mask: np.ndarray, crowd: bool) -> Any:
    """A mask (H, W) in one of the forms that COCO's files have."""
    if crowd:
        column_by_column = np.concatenate([[0], mask.T.ravel(), [2]])
        changes = np.flatnonzero(np.diff(column_by_column))
        counts = np.diff(np.concatenate([[0], changes])).tolist()
        return {"size": list(mask.shape), "counts": counts}
    kind = rng.integers(4)
    return coco_masks.encode(mask[None])[0] if kind == 0 else outline(mask, 2 if kind == 1 else 1)


def annotations(rng: np.random.Generator, made: dict[str, Any], image: int) -> list[dict[str, Any]]:
    """The objects of a scene; every fifth scene has the first two of a class, or the first alone, as a crowd."""
    masks, labels = made["masks"].numpy(), made["labels"].tolist()
    groups = [[i] for i in range(len(labels))]
    if image % 5 == 0 and labels:
        crowd = [i for i, label in enumerate(labels) if label == labels[0]][:2]
        groups = [crowd, *([i] for i in range(len(labels)) if i not in crowd)]
    found = []
    for number, group in enumerate(groups):
        mask, crowd_of = masks[group].max(0), image % 5 == 0 and number == 0
        stored = segmentation(rng, mask, crowd_of)
        rle = (
            coco_masks.from_polygons(stored, mask.shape)
            if isinstance(stored, list)
            else coco_masks.encode(mask[None])[0]
        )
        y, x = np.nonzero(mask)
        box = [x.min(), y.min(), x.max() + 1 - x.min(), y.max() + 1 - y.min()]
        found.append(
            {
                "id": 1000 * image + number,
                "image_id": image,
                "category_id": 3 * labels[group[0]] + 1,
                "bbox": [float(side) for side in box],
                "area": float(coco_masks.area([rle])[0]),
                "iscrowd": int(crowd_of),
                "segmentation": stored,
            }
        )
    return found


def make(folder: Path, train: int, val: int, side: int = 540, seed: int = 0) -> None:
    """Writes the whole set."""
    (folder / "annotations").mkdir(parents=True, exist_ok=True)
    options = Scenes(digits=(1, 9), digit_size=(0.1, 0.4))
    for split, count in (("train", train), ("val", val)):
        content: dict[str, list[Any]] = {"images": [], "annotations": [], "categories": CATEGORIES}
        (folder / f"{split}2017").mkdir(exist_ok=True)
        for number in range(count):
            rng = np.random.default_rng([seed, split == "val", number])
            aspect, scale = rng.choice(ASPECTS), side * rng.uniform(0.8, 1.2)
            height, width = round(scale / aspect**0.5), round(scale * aspect**0.5)
            few = Scenes(digits=(0, 0)) if number % 8 == 3 else options
            made = scene(split, int(rng.integers(2**62)), (height, width), few)
            image = 7 * number + 2
            entry = {"id": image, "file_name": f"{image:012}.jpg", "height": height, "width": width}
            photo = Image.fromarray(made["image"].permute(1, 2, 0).contiguous().numpy())
            photo.save(folder / f"{split}2017" / str(entry["file_name"]), quality=90)
            content["images"].append(entry)
            content["annotations"] += annotations(rng, made, image)
        path = folder / "annotations" / f"instances_{split}2017.json"
        path.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=200)
    parser.add_argument("--val", type=int, default=50)
    parser.add_argument("--side", type=int, default=540, help="square root of the mean number of pixels")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    make(given.folder, given.train, given.val, given.side, given.seed)
