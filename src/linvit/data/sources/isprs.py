"""The ISPRS sets of aerial images, Vaihingen and Potsdam: large pictures with colour-coded masks."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from linvit.data.sources.folder import files_below
from linvit.data.sources.masks import UNKNOWN, MaskReader
from linvit.data.sources.read import BadImageError
from linvit.data.sources.tiles import Area
from linvit.errors import UserError, quote_first
from linvit.ignore_index import IGNORE_INDEX

ISPRS_COLOURS = ((255, 255, 255), (0, 0, 255), (0, 255, 255), (0, 255, 0), (255, 255, 0), (255, 0, 0))
"""Impervious surfaces, building, low vegetation, tree, car, clutter: the order of `class_names/isprs.txt`."""
BOUNDARY = (0, 0, 0)  # pixels about the edges, which eroded masks leave out
STRAY = 0.01  # fraction of the pixels of a picture that may have other colours, as some of Potsdam's have


class AerialSet(NamedTuple):
    """A set: a pattern whose group is the area in the name of a file, and the areas of validation and test."""

    area: str
    val: frozenset[str]
    test: frozenset[str]


SETS = {
    "vaihingen": AerialSet(
        r"area(\d+)",
        frozenset({"30"}),
        frozenset(
            {*("2", "4", "6", "8", "10", "12", "14", "16", "20"), *("22", "24", "27", "29", "31", "33", "35", "38")}
        ),
    ),
    "potsdam": AerialSet(
        r"potsdam_(\d+_\d+)",
        frozenset({"2_10"}),
        frozenset(
            {
                *("2_13", "2_14", "3_13", "3_14", "4_13", "4_14", "4_15"),
                *("5_13", "5_14", "5_15", "6_13", "6_14", "6_15", "7_13"),
            }
        ),
    ),
}


def isprs_areas(of: AerialSet, images: Path, masks: Path, eval_masks: Path | None = None) -> list[Area]:
    """The pictures of a set with their masks; those of validation and test may be others: eroded ones."""
    found = [_by_area(of, folder) for folder in (images, masks, eval_masks or masks)]
    chosen = []
    for name, image in found[0].items():
        split = "test" if name in of.test else "val" if name in of.val else "train"
        labels = found[1 if split == "train" else 2]
        if name not in labels:
            folder = masks if split == "train" else eval_masks or masks
            raise UserError(
                f"'{image}' ({split}) has no mask in '{folder}', which has the areas {quote_first(sorted(labels), 40)}"
            )
        chosen.append(Area(name, split, image, labels[name]))
    return chosen


def read_classes(path: str) -> tuple[Image.Image, int]:
    """A colour-coded mask as numbers with the set's colours as palette, and how many stray pixels of it are ignored."""
    reader = MaskReader(len(ISPRS_COLOURS), values=[*ISPRS_COLOURS], ignored=[BOUNDARY])
    try:
        raw = reader.raw({"bytes": None, "path": path}, path)
    except BadImageError as error:
        raise UserError(f"cannot read '{error.name}': {error.reason}") from error
    mask = reader.classify(raw)
    stray = mask == UNKNOWN
    if stray.mean() > STRAY:
        raise UserError(f"'{path}' is not a mask of this set: {stray.mean():.0%} of its pixels have other colours")
    mask[stray] = IGNORE_INDEX
    picture = Image.fromarray(mask, "P")
    picture.putpalette([*np.array(ISPRS_COLOURS).flatten().tolist(), *[0] * 3 * (256 - len(ISPRS_COLOURS))])
    return picture, int(stray.sum())


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
