"""Masks that are taken for classes, or for images without a class."""

import os
import re
from collections import defaultdict
from itertools import permutations

import datasets
import numpy as np

from linvit.data.sources.labels import undecoded
from linvit.data.sources.pairs import IMAGE_FOLDERS, MASK_FOLDERS
from linvit.data.sources.read import ImageReader
from linvit.data.transforms.decode import header, stored_values

MOST_KINDS = 8  # of files in a set that is looked at
LOOKED_AT = 3  # images and masks
COLOURS = 32  # masks have fewer, photos have more
NAME = re.compile(r"mask|annot|segm", re.IGNORECASE)  # in names of folders of masks
ENDING = re.compile(r"([_-]?(mask|annot|segm|label|gt|leftImg8bit)[a-z]*+)+$", re.IGNORECASE)  # of names of masks


def find_masks(rows: datasets.Dataset, image: str, reader: ImageReader) -> tuple[str, str] | None:
    """Returns an image and its mask, if one group of files in a folder are the masks of another group.

    Files of a kind share their folder, the suffix of their names, such as `_mask`, and their format. Either two folders
    in one folder are called images and masks; or both files have the same stem, and the folder is called so, or the
    mask has few colours and the image many.
    """
    stored = undecoded(rows, image).with_format("arrow")[:][image].combine_chunks()
    files: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)  # path of each stem, for each kind
    for path in stored.field("path").to_pylist():
        if len(files) > MOST_KINDS:
            break
        folder, name = os.path.split(path)
        stem = ENDING.sub("", name.rpartition(".")[0])
        files[folder, name.removeprefix(stem)][stem] = path
    for images, masks in permutations(files, 2):
        above, names = zip(*(os.path.split(folder) for folder, _ in (images, masks)), strict=True)
        if above[0] == above[1] and names[0] in IMAGE_FOLDERS and names[1] in MASK_FOLDERS:
            return next(iter(files[images].values())), next(iter(files[masks].values()))
        if len(files) > MOST_KINDS:  # too many to be compared
            continue
        both = sorted(files[images].keys() & files[masks].keys())
        if 10 * len(both) < 9 * max(len(files[images]), len(files[masks])):
            continue
        pairs = [(files[images][stem], files[masks][stem]) for stem in both[:LOOKED_AT]]
        named = NAME.search(names[1]) and not NAME.search(names[0])  # with_mask and without_mask are classes
        if named or all(_is_mask(reader, *pair) for pair in pairs):
            return pairs[0]
    return None


def _is_mask(reader: ImageReader, image: str, mask: str) -> bool:
    """True if one image has few colours, and another of the same size has more."""
    counts, sizes = [], []
    for path in (image, mask):
        try:
            data = reader.load({"bytes": None, "path": path})
            kind = header(data)
            reader.check(kind)
            values = stored_values(data, kind, False, path, reader.most)
        except MemoryError:
            raise
        except Exception:  # a damaged file, which is met when it is used
            return False
        sizes.append(values.shape[1:])
        counts.append(len(np.unique(values.reshape(len(values), -1).T, axis=0)))
    return sizes[0] == sizes[1] and counts[1] <= COLOURS < counts[0]
