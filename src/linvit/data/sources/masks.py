"""Masks: conversion of their values to classes, and a check of values and sizes before the first step."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from linvit.data.sources.images import wrong_size
from linvit.data.sources.labels import undecoded
from linvit.data.sources.read import BadImageError, ImageReader, Stored, name_of, reason_of
from linvit.data.sources.scan import ImageFinding, look_at
from linvit.data.transforms.decode import header, open_image, turn_after_pil, upright, white_of
from linvit.errors import UserError, quote_first
from linvit.ignore_index import IGNORE_INDEX

UNKNOWN = 254  # marks values that are not classes; so there are at most 254 classes
LOSSY = ("JPEG", "JPEG2000", "WEBP", "AVIF")
LOSSY_TIFF = ("jpeg", "tiff_jpeg", "webp")  # PIL's names of compressions
NUMBER_VALUES = 2**16  # values of masks of numbers
COLOUR_VALUES = 2**24
Value = int | tuple[int, int, int]
"""Value of a pixel of a mask: a number, or a colour (red, green, blue)."""


class MaskValueError(BadImageError):
    """A readable mask with values that are not classes, or may not be."""


class MaskReader:
    """Reads masks of numbers or colours as classes; see `SegmentationData`. `ignored` stand for none, as does 255."""

    def __init__(
        self,
        num_classes: int,
        reduce_zero_label: bool = False,
        values: Sequence[Value] | None = None,
        ignored: Sequence[Value] = (),
        images: ImageReader = ImageReader(),  # noqa: B008 (frozen)
    ) -> None:
        if not 1 <= num_classes <= UNKNOWN:
            raise UserError(f"masks of 8 bits have 1 to {UNKNOWN} classes; got {num_classes}")
        if values is not None and reduce_zero_label:
            raise UserError("with mask_values, which says what each class is in the masks, reduce_zero_label is false")
        if values is not None and len(values) != num_classes:
            raise UserError(f"mask_values has {len(values)} values for {num_classes} classes; give one for each class")
        first = int(reduce_zero_label)
        chosen = range(first, num_classes + first) if values is None else [*values]
        self.num_classes = num_classes
        self.reduce_zero_label = reduce_zero_label
        self.coloured = values is not None and any(isinstance(value, tuple) for value in chosen)
        self.classes = {value: index for index, value in enumerate(chosen)}
        without = [*ignored] + [0] * reduce_zero_label
        without += [] if self.coloured or IGNORE_INDEX in self.classes else [IGNORE_INDEX]
        both = [value for value in without if value in self.classes]
        kinds = {type(value) for value in (*self.classes, *without)}
        if len(self.classes) < num_classes or both or len(kinds) > 1:
            raise UserError(
                f"mask_values and ignored_values must be different numbers, or different colours [red, green, blue]; "
                f"got {list(values or self.classes)} and {list(ignored)}"
            )
        self.given = values is not None
        self.without = without
        self.meaning = tuple((self.classes | dict.fromkeys(without, IGNORE_INDEX)).items())
        self.images = images

    def __call__(self, stored: Stored, name: str) -> Tensor:
        """Reads the mask of the image of a name as classes, 8-bit (h, w); 255 is ignored."""
        label = name_of(stored, f"the mask of {name}")
        raw = self.raw(stored, label)
        mask = self.classify(raw)
        if (mask == UNKNOWN).any():
            raise MaskValueError(label, self._complaint(np.unique(raw[mask == UNKNOWN]).tolist()))
        return torch.from_numpy(mask)

    def classify(self, raw: np.ndarray) -> np.ndarray:
        """Maps pixel values, as `raw` returns them, to classes, 8-bit; `UNKNOWN` for other values."""
        return table(self.meaning, COLOUR_VALUES if self.coloured else NUMBER_VALUES).take(raw)

    def raw(self, stored: Stored, label: str) -> np.ndarray:
        """Returns the values of the pixels of a mask (h, w): numbers below 65,536, or colours as 24-bit numbers."""
        try:
            data = self.images.load(stored)
            kind = header(data)
            if kind.width * kind.height > self.images.max_pixels:
                raise OSError(f"{kind.width} x {kind.height} pixels are more than {self.images.max_pixels}")
            with open_image(data) as picture:
                if reason := changed(picture, data):
                    raise MaskValueError(label, reason)
                values = self._colours(picture) if self.coloured else self._numbers(picture, data)
            return np.ascontiguousarray(upright(values, turn_after_pil(kind, self.images.exif_orientation)))
        except (MemoryError, BadImageError):
            raise
        except Exception as error:  # decoders raise nearly anything on damaged files
            raise BadImageError(label, reason_of(error)) from error

    def _complaint(self, unknown: list[int]) -> str:
        """Returns the error message for a mask with these values of `raw`."""
        kind = "colours" if self.coloured else "values"
        values = [(raw >> 16, raw >> 8 & 255, raw & 255) if self.coloured else raw for raw in unknown[:5]]
        listed = ", ".join(map(str, values)) + (", ..." if len(unknown) > 5 else "")
        first, *_, last = 2 * [*self.classes]
        shown = ", ".join(map(str, self.classes)) if self.given else f"{first} to {last}"
        ignored = f"; ignored: {', '.join(map(str, self.without))}" if self.without else ""
        way = f"If they stand for no class, set --data.ignored_values={_plain(values)}"
        if not self.given and (count := unknown[-1] + 1 - self.reduce_zero_label) <= UNKNOWN:
            way += (
                f"; if they are classes, --data.num_classes={count}, or --data.mask_values with the value of each class"
            )
        if unknown == [self.num_classes] and not self.given:
            way += ", or --data.reduce_zero_label=true if classes count from 1 and 0 is for pixels without a class"
        return f"its {kind} {listed} are not classes ({self.num_classes} classes: {shown}{ignored}). {way}"

    def _numbers(self, picture: Image.Image, data: bytes) -> np.ndarray:
        if picture.mode in ("1", "P"):
            return np.asarray(picture).astype(np.uint8)
        if picture.mode == "L" or picture.mode.startswith("I"):
            return grey_numbers(picture, data)
        if picture.mode in ("RGB", "RGBA", "LA"):
            red, green, blue = np.asarray(picture.convert("RGB")).transpose(2, 0, 1)
            if np.array_equal(red, green) and np.array_equal(red, blue):
                return np.ascontiguousarray(red)
            found = _plain(np.unique(np.stack([red, green, blue], -1).reshape(-1, 3), axis=0)[:SHOWN_BY_CHECK].tolist())
            raise OSError(f"its pixels are colours; say the colour of each class, as in --data.mask_values={found}")
        raise OSError(f"its pixels are of the kind {picture.mode}, which are not classes")

    def _colours(self, picture: Image.Image) -> np.ndarray:
        pixels = np.asarray(picture.convert("RGB")).astype(np.int32)
        return np.asarray(pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2])


def grey_numbers(picture: Image.Image, data: bytes) -> np.ndarray:
    """Returns the numbers (h, w) of an opened grey mask as its file stores them, 8 or 16 bits."""
    shown, stored = white_of(picture, data)
    values = np.asarray(picture)
    if values.min() < 0 or values.max() >= NUMBER_VALUES:
        raise OSError(
            f"its values go from {values.min()} to {values.max()}; classes must be between 0 and {NUMBER_VALUES - 1}"
        )
    if shown != stored and picture.mode in ("L", "I"):  # which PIL has stretched
        values = (values.astype(np.uint32) * stored + shown // 2) // shown
    return values.astype(np.uint8 if picture.mode == "L" else np.uint16, copy=False)


def changed(picture: Image.Image, data: bytes) -> str:
    """Returns the reason why the values of an opened mask differ from those that were labelled; "" if they do not."""
    kind = "JPEG" if picture.format == "MPO" else picture.format
    if kind in LOSSY or picture.info.get("compression") in LOSSY_TIFF:
        return (
            f"a mask saved as {kind}{' with lossy compression' * (kind == 'TIFF')} has other labels at edges than it "
            f"had before; save masks without loss, as PNG, from before they were compressed"
        )
    shown, stored = white_of(picture, data)
    if shown != stored and picture.mode not in ("L", "I"):
        return f"its colours have values up to {stored} in place of 255, which would be lost; save it as PNG of 8 bits"
    if kind == "TIFF" and picture.mode == "L" and picture.tag_v2.get(262) == 0:  # type: ignore[attr-defined]
        return "a TIFF whose 0 is white: programs differ in whether its values are inverted; save it as PNG"
    return ""


def _plain(values: Iterable[Any]) -> str:
    """Returns a list as the command line takes it."""
    return json.dumps([*values], separators=(",", ":"))


def propose_classes(rows: datasets.Dataset, mask: str, images: ImageReader) -> str:
    """Returns a message with the options that fit the values of some masks; "" if these cannot be read."""
    reader, found = MaskReader(UNKNOWN, images=images), set[int]()
    for number in np.linspace(0, len(rows) - 1, min(len(rows), SHOWN_BY_CHECK)).astype(int).tolist():
        try:
            found.update(np.unique(reader.raw(rows[number][mask], "")).tolist())
        except BadImageError as error:
            return f"; of one mask, {error.reason}"
    if found == {0, 255}:
        return "; the masks hold 0 and 255, so two classes are --data.mask_values=[0,255]"
    classes = found - {IGNORE_INDEX}
    if not classes or max(classes) >= UNKNOWN:
        return f"; the masks hold {_plain(sorted(found))}"
    return f"; the masks hold {_plain(sorted(found))}, which --data.num_classes={max(classes) + 1} takes"


def as_value(value: Any) -> Value:
    """Returns a number or a colour as configurations state them."""
    parts = [value] if isinstance(value, int) else value if isinstance(value, Sequence) else []
    limit = NUMBER_VALUES if len(parts) == 1 else 256
    if len(parts) not in (1, 3) or not all(isinstance(part, int) and 0 <= part < limit for part in parts):
        raise UserError(
            f"a value of a mask is a number from 0 to {NUMBER_VALUES - 1} or a colour [red, green, blue]; got {value}"
        )
    return value if isinstance(value, int) else (parts[0], parts[1], parts[2])


@cache
def table(meaning: tuple[tuple[Value, int], ...], length: int) -> np.ndarray:
    """Returns the class of each value of a raw mask, 8-bit; `UNKNOWN` for values that are none."""
    classes = np.full(length, UNKNOWN, np.uint8)
    for value, index in meaning:
        classes[value if isinstance(value, int) else value[0] << 16 | value[1] << 8 | value[2]] = index
    return classes


LOOKED_AT = 200  # masks of a larger set, spread evenly; it takes about a second
SHOWN = 6  # classes in a message
SHOWN_BY_CHECK = 20  # in a line of `linvit data check`


class MaskFinding(NamedTuple):
    """One mask by its path or row: why it is bad, whether it can be read, and the pixels of each class and of 255.

    `turned` says that its image is turned by EXIF and the mask is not, or the other way round, and sizes do not tell
    which of the two views was labelled.
    """

    name: str
    reason: str = ""
    readable: bool = True
    pixels: Mapping[int, int] = {}
    turned: bool = False


class Masks(NamedTuple):
    """The masks of a split, in a column beside that of images."""

    rows: datasets.Dataset
    image: str
    mask: str
    reader: MaskReader

    def look(self, row: Mapping[str, Any], number: int) -> MaskFinding:
        """Examines the mask of a row."""
        image = name_of(row[self.image], f"row {number}")
        try:
            classes = self.reader(row[self.mask], image)
        except BadImageError as error:
            return MaskFinding(error.name, error.reason, isinstance(error, MaskValueError))
        images, name = self.reader.images, name_of(row[self.mask], f"the mask of {image}")
        size = images.size(row[self.image])
        if size not in (None, classes.shape):
            return MaskFinding(name, wrong_size("it has", classes.shape, size))
        pixels = dict(zip(*map(Tensor.tolist, classes.unique(return_counts=True)), strict=True))
        turns = {images.turn(kind) for stored in (row[self.image], row[self.mask]) if (kind := images.kind(stored))}
        told = size is not None and size[0] != size[1] and len({turn >= 5 for turn in turns}) > 1
        return MaskFinding(name, pixels=pixels, turned=len(turns) > 1 and not told)

    def check(self, names: list[str] | None, split: str, source: str) -> None:
        """Compares masks with the classes and the sizes of their images; training handles single unreadable files."""
        rows, reader = undecoded(self.rows, self.image, self.mask), self.reader
        chosen = np.linspace(0, len(rows) - 1, min(len(rows), LOOKED_AT)).astype(int).tolist()
        pixels, bad, turned = _sums(self.look(rows[number], number) for number in chosen)
        for found in bad:
            if found.readable:
                raise UserError(f"{found.name} in '{source}': {found.reason}")
        if len(bad) == len(chosen):
            raise UserError(f"cannot read any of {len(bad)} masks of '{source}'; {bad[0].name}: {bad[0].reason}")
        as_they_are = not reader.given and not reader.reduce_zero_label
        if as_they_are and reader.num_classes > 1 and pixels.keys() == {0, IGNORE_INDEX}:
            raise UserError(
                f"the masks of '{source}' hold 0 and 255 only, and 255 is the label of ignored pixels; if they are "
                f"black and white for two classes, set --data.mask_values=[0,255]"
            )
        if pixels.keys() == {IGNORE_INDEX}:
            raise UserError(
                f"no pixel of {len(chosen)} {split} masks of '{source}' has a class: all are ignored. Are they the "
                f"right masks, and do they count classes as --data.reduce_zero_label and --data.ignored_values say?"
            )
        names = names or [str(index) for index in range(reader.num_classes)]
        where = f"{len(chosen)} of the {len(rows)} {split} masks of '{source}'"
        if turned:
            rank_zero_warn(f"{where}: {_turned(turned)}")
        rank_zero_info(f"{where}: {_shares(pixels, names, SHOWN)}")
        absent = [name for index, name in enumerate(names) if index not in pixels]
        if absent and split == "train" and len(chosen) == len(rows):
            rank_zero_warn(f"{where}: no pixel is of the classes {quote_first(absent)}")

    def describe(self, split: str, names: list[str], workers: int) -> tuple[list[str], list[ImageFinding]]:
        """Examines all masks in several processes: lines about the classes, and the bad masks."""
        found = look_at(undecoded(self.rows, self.image, self.mask), self.look, workers)
        pixels, bad, turned = _sums(tqdm(found, total=len(self.rows), unit=" masks"))
        shares = _shares(pixels, names, SHOWN_BY_CHECK) if pixels else "all are unusable"
        lines = [f"  {split:<10}{len(self.rows):>12,} masks: {shares}"]
        if pixels and (absent := [name for index, name in enumerate(names) if index not in pixels]):
            lines.append(f"  {split:<10}WARNING: {len(absent)} classes have no pixel: {quote_first(absent)}")
        lines += [f"  {split:<10}WARNING: {_turned(turned)}"] if turned else []
        return lines, [ImageFinding("mask", one.name, one.reason) for one in bad]


def _sums(masks: Iterable[MaskFinding]) -> tuple[Counter[int], list[MaskFinding], list[str]]:
    """Returns pixels per class in all good masks, the bad masks, and the names of masks rotated unlike their image."""
    pixels, bad, turned = Counter[int](), [], []
    for found in masks:
        pixels.update(found.pixels)
        bad += [found] if found.reason else []
        turned += [found.name] if found.turned else []
    return pixels, bad, turned


def _turned(names: Sequence[str]) -> str:
    """Says that masks are turned unlike their images."""
    return (
        f"{len(names)} masks have another EXIF orientation than their image ({quote_first(names, 3)}). If these masks "
        f"label the pixels as they are stored, set --data.exif_orientation=false, which turns neither; if they label "
        f"what viewers show, ignore this"
    )


def _shares(pixels: Mapping[int, int], names: list[str], shown: int) -> str:
    """Returns a phrase with the frequencies of the most frequent classes."""
    counted = Counter(pixels)
    total, ignored = max(counted.total(), 1), counted.pop(IGNORE_INDEX, 0)
    largest = ", ".join(f"{names[index]} {count / total:.1%}" for index, count in counted.most_common(shown))
    more = f" and {len(counted) - shown} more classes" if len(counted) > shown else ""
    return f"{largest}{more}; ignored {ignored / total:.1%}"
