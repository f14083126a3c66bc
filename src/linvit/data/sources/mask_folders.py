"""Folders of masks that are taken for classes."""

import re
from collections import defaultdict
from itertools import permutations
from pathlib import PurePath

import datasets
import numpy as np

from linvit.data.sources.labels import undecoded
from linvit.data.sources.read import ImageReader
from linvit.data.transforms.decode import header, stored_values

MOST_CLASSES = 8  # of a set that is looked at
LOOKED_AT = 3  # images and masks
COLOURS = 32  # masks have fewer, photos have more
NAME = re.compile(r"mask|annot|segm", re.IGNORECASE)  # in names of folders of masks
ENDING = re.compile(r"[_-]?(mask|annot|segm|label|gt)[a-z]*$", re.IGNORECASE)  # of names of masks


def find_masks(rows: datasets.Dataset, image: str, label: str, reader: ImageReader) -> tuple[str, str] | None:
    """Two classes whose files are called alike, and of which one is called masks or has few colours, the other many."""
    names = getattr(rows.features[label], "names", [])
    if not 2 <= len(names) <= MOST_CLASSES:
        return None
    stored = undecoded(rows, image).with_format("arrow")[:][image].combine_chunks()
    files: dict[str, dict[str, str]] = defaultdict(dict)  # path of each stem, for each class
    for path, number in zip(stored.field("path").to_pylist(), rows[label], strict=True):
        if path is None or number is None:
            return None
        files[names[number]][ENDING.sub("", PurePath(path).stem)] = path
    for images, masks in permutations(files, 2):
        both = sorted(files[images].keys() & files[masks].keys())
        if 10 * len(both) < 9 * max(len(files[images]), len(files[masks])):
            continue
        pairs = [(files[images][stem], files[masks][stem]) for stem in both[:LOOKED_AT]]
        if NAME.search(masks) or all(_is_mask(reader, *pair) for pair in pairs):
            return images, masks
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
