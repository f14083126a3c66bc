"""Looks at masks before the first step: which values they have, and whether they fit their images."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import datasets
import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from linvit.data.sources.images import wrong_size
from linvit.data.sources.masks import MaskReader
from linvit.data.sources.read import BadImageError, name_of
from linvit.data.sources.scan import ImageFinding
from linvit.errors import UserError, quote_first
from linvit.ignore_index import IGNORE_INDEX

LOOKED_AT = 200  # masks of a larger set, spread evenly; it takes about a second
SHOWN = 6  # classes in a message
SHOWN_BY_CHECK = 20  # in a line of `linvit data check`


class MaskFinding(NamedTuple):
    """One mask by its path or row: why it is bad, whether it can be read, and the pixels of each class and of 255."""

    name: str
    reason: str = ""
    readable: bool = True
    pixels: Mapping[int, int] = {}


class Masks(Dataset[MaskFinding]):
    """The masks of a split, in a column beside that of images; one is examined when its row is read."""

    def __init__(self, rows: datasets.Dataset, image: str, mask: str, reader: MaskReader) -> None:
        self.image, self.mask = image, mask
        self.rows = rows.select_columns([image, mask])
        for column in (image, mask):
            self.rows = self.rows.cast_column(column, datasets.Image(decode=False))
        self.reader = reader

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> MaskFinding:
        row, reader = self.rows[index], self.reader
        name = name_of(row[self.mask], f"the mask of {name_of(row[self.image], f'row {index}')}")
        try:
            raw = reader.raw(row[self.mask], name)
        except BadImageError as error:
            return MaskFinding(name, error.reason, readable=False)
        found = dict(zip(*(part.tolist() for part in np.unique(raw, return_counts=True)), strict=True))
        if unknown := reader.unknown(found):
            return MaskFinding(name, reader.complaint(unknown))
        size = reader.images.size(row[self.image])
        if size is not None and size != raw.shape:
            return MaskFinding(name, wrong_size("it has", raw.shape, size))
        meaning, pixels = dict(reader.meaning), Counter[int]()
        for value, count in found.items():
            pixels[meaning[reader.value(value)]] += count
        return MaskFinding(name, pixels=pixels)


def check_masks(masks: Masks, names: list[str] | None, split: str, source: str) -> None:
    """Holds masks to the classes and to the sizes of their images, and says how frequent the classes are.

    Single files that cannot be read are left to training, which skips them or not.
    """
    chosen = np.linspace(0, len(masks) - 1, min(len(masks), LOOKED_AT)).astype(int).tolist()
    reader = masks.reader
    names = names or [str(index) for index in range(reader.num_classes)]
    pixels, bad = _examine(masks[number] for number in chosen)
    for found in bad:
        if found.readable:
            raise UserError(f"{found.name} in '{source}': {found.reason}")
    if len(bad) == len(chosen):
        raise UserError(f"none of {len(bad)} masks of '{source}' can be read; {bad[0].name}: {bad[0].reason}")
    as_they_are = not reader.given and not reader.reduce_zero_label
    if as_they_are and reader.num_classes > 1 and pixels.keys() == {0, IGNORE_INDEX}:
        raise UserError(
            f"the masks of '{source}' hold 0 and 255 only, and 255 is the label of ignored pixels; if they are black "
            f"and white for two classes, set --data.mask_values=[0,255]"
        )
    if pixels.keys() == {IGNORE_INDEX}:
        without = ", ".join(map(str, reader.without))
        raise UserError(
            f"no pixel of {len(chosen)} {split} masks of '{source}' has a class: all are ignored ({without}). Are they "
            f"the right masks, and do they count classes as --data.reduce_zero_label and --data.ignored_values say?"
        )
    where = f"{len(chosen)} of the {len(masks)} {split} masks of '{source}'"
    rank_zero_info(f"{where}: {_shares(pixels, names, SHOWN)}")
    absent = [name for index, name in enumerate(names) if index not in pixels]
    if absent and split == "train" and len(chosen) == len(masks):
        rank_zero_warn(f"{where}: no pixel is of the classes {quote_first(absent)}")


def describe_masks(masks: Masks, split: str, names: list[str], workers: int) -> tuple[list[str], list[ImageFinding]]:
    """Examines all masks of a split in several processes: lines about the classes, and the bad masks."""
    pixels, bad = _examine(tqdm(DataLoader(masks, None, num_workers=workers), unit=" masks"))
    lines = [f"  {split:<10}{len(masks):>12,} masks: {_shares(pixels, names, SHOWN_BY_CHECK)}"]
    absent = [name for index, name in enumerate(names) if index not in pixels]
    if absent:
        listed = ", ".join(absent[:SHOWN_BY_CHECK])
        lines.append(f"  {split:<10}WARNING: {len(absent)} classes have no pixel: {listed}")
    return lines, [ImageFinding("mask", found.name, found.reason) for found in bad]


def _examine(masks: Iterable[MaskFinding]) -> tuple[Counter[int], list[MaskFinding]]:
    """The pixels of each class in all good masks, and the bad ones."""
    pixels, bad = Counter[int](), []
    for found in masks:
        pixels.update(found.pixels)
        bad += [found] if found.reason else []
    return pixels, bad


def _shares(pixels: Mapping[int, int], names: list[str], shown: int) -> str:
    """How frequent the most frequent classes are, in words."""
    counted = Counter(pixels)
    total, ignored = max(counted.total(), 1), counted.pop(IGNORE_INDEX, 0)
    largest = ", ".join(f"{names[index]} {count / total:.1%}" for index, count in counted.most_common(shown))
    more = f" and {len(counted) - shown} more classes" if len(counted) > shown else ""
    return f"{largest}{more}; ignored {ignored / total:.1%}"
