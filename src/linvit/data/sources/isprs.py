"""The ISPRS sets of aerial images, Vaihingen and Potsdam: large pictures, cut into tiles with masks of numbers."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from linvit.data.sources.folder import files_below
from linvit.data.sources.masks import UNKNOWN, MaskReader, Value
from linvit.data.sources.read import BadImageError, read
from linvit.errors import UserError, some
from linvit.ignore_index import IGNORE_INDEX

COLOURS = ((255, 255, 255), (0, 0, 255), (0, 255, 255), (0, 255, 0), (255, 255, 0), (255, 0, 0))
"""Impervious surfaces, building, low vegetation, tree, car, clutter: the order of `class_names/isprs.txt`."""
BOUNDARY = (0, 0, 0)  # pixels about the edges, which eroded masks leave out
STRAY = 0.01  # fraction of the pixels of a picture that may have other colours, as some of Potsdam's have


class AerialSet(NamedTuple):
    """What a set calls its areas, and which of them are held out.

    Attributes:
        area: A pattern whose group is the area in the name of a file.
        val: Areas of validation.
        test: Areas of the official test set; all others are for training.
    """

    area: str
    val: frozenset[str]
    test: frozenset[str]


SETS = {
    "vaihingen": AerialSet(
        r"area(\d+)",
        frozenset({"30"}),
        frozenset(["2", "4", "6", "8", "10", "12", "14", "16", "20", "22", "24", "27", "29", "31", "33", "35", "38"]),
    ),
    "potsdam": AerialSet(
        r"potsdam_(\d+_\d+)",
        frozenset({"2_10"}),
        frozenset(
            [
                "2_13",
                "2_14",
                "3_13",
                "3_14",
                "4_13",
                "4_14",
                "4_15",
                "5_13",
                "5_14",
                "5_15",
                "6_13",
                "6_14",
                "6_15",
                "7_13",
            ]
        ),
    ),
}


class Area(NamedTuple):
    """A picture, its mask, and the split that it belongs to."""

    name: str
    split: str
    image: str
    mask: str


def areas(of: AerialSet, images: Path, masks: Path, eval_masks: Path | None = None) -> list[Area]:
    """The pictures of a set with their masks.

    Args:
        of: The set.
        images: Folder of the pictures.
        masks: Folder of the colour-coded masks.
        eval_masks: Folder of the masks of validation and test, if they are others: eroded ones.

    Raises:
        UserError: If an area has no picture or no mask.
    """
    found = [_by_area(of, folder) for folder in (images, masks, eval_masks or masks)]
    chosen = []
    for name, image in found[0].items():
        split = "test" if name in of.test else "val" if name in of.val else "train"
        labels = found[1 if split == "train" else 2]
        if name not in labels:
            folder = masks if split == "train" else eval_masks or masks
            raise UserError(
                f"'{image}' ({split}) has no mask in '{folder}', which has the areas {some(sorted(labels), 40)}"
            )
        chosen.append(Area(name, split, image, labels[name]))
    return chosen


def cut(area: Area, size: int, stride: int, output: Path) -> tuple[int, int]:
    """Writes the tiles of a picture as `SPLIT/images/*.png` and `SPLIT/masks/*.png`.

    Masks are of numbers, with the set's colours as their palette. The last training tiles of a row or column are
    shifted inwards, so that all are whole; those of validation and test do not overlap, and are cut off at the edge, so
    that each pixel counts once.

    Returns:
        How many tiles there are, and how many pixels are ignored because they have a stray colour.

    Raises:
        UserError: If a file cannot be read, image and mask differ in size, or many pixels have stray colours.
    """
    try:
        image = read({"bytes": None, "path": area.image}, area.image, exif_orientation=False).permute(1, 2, 0).numpy()
        mask, strays = _classes(area.mask)
    except BadImageError as error:
        raise UserError(f"cannot read '{error.name}': {error.reason}") from error
    if mask.shape != image.shape[:2]:
        raise UserError(f"'{area.mask}' has {mask.shape} pixels (rows, columns), but '{area.image}' {image.shape[:2]}")
    palette = [*np.array(COLOURS).flatten().tolist(), *[0] * 3 * (256 - len(COLOURS))]
    count = 0
    step = stride if area.split == "train" else size
    for top in offsets(mask.shape[0], size, step, shift=area.split == "train"):
        for left in offsets(mask.shape[1], size, step, shift=area.split == "train"):
            part = slice(top, top + size), slice(left, left + size)
            labels = Image.fromarray(mask[part], "P")
            labels.putpalette(palette)
            for kind, picture in (("images", Image.fromarray(image[part])), ("masks", labels)):
                folder = output / area.split / kind
                folder.mkdir(parents=True, exist_ok=True)
                picture.save(folder / f"{area.name}_{top}_{left}.png")
            count += 1
    return count, strays


def offsets(length: int, size: int, stride: int, shift: bool) -> Iterator[int]:
    """Where tiles begin along an axis; with `shift` the last one ends with the picture, if it is larger than a tile."""
    for start in range(0, max(length - size + stride, 1), stride):
        if start < length:
            yield max(min(start, length - size), 0) if shift else start


def _by_area(of: AerialSet, folder: Path) -> dict[str, str]:
    """The files in a folder by their areas."""
    if not folder.is_dir():
        raise UserError(f"there is no folder '{folder}'")
    found: dict[str, str] = {}
    for path in files_below(folder):
        match = re.search(of.area, Path(path).name)
        if match is None:
            continue
        if match[1] in found:
            raise UserError(f"'{found[match[1]]}' and '{path}' are of the same area; give a folder with one of each")
        found[match[1]] = path
    if not found:
        raise UserError(f"no image in '{folder}' has a name of this set, which matches the pattern {of.area}")
    return found


def _classes(path: str) -> tuple[np.ndarray, int]:
    """A colour-coded mask as numbers (h, w), 8-bit, and how many pixels have a stray colour, which are ignored."""
    values: list[Value] = [*COLOURS]
    reader = MaskReader(len(COLOURS), values=values, ignored=[BOUNDARY])
    raw = reader.raw({"bytes": None, "path": path}, path)
    mask = reader.classify(raw)
    stray = mask == UNKNOWN
    if stray.mean() > STRAY:
        raise UserError(f"'{path}' is no mask of this set: {stray.mean():.0%} of its pixels have other colours")
    mask[stray] = IGNORE_INDEX
    return mask, int(stray.sum())
