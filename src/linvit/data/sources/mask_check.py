"""Looks at some masks of a set before the first step: which values they have, and whether they fit their images."""

from collections import Counter

import datasets
import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from PIL import ExifTags

from linvit.data.sources.masks import MaskReader, counts
from linvit.data.sources.read import BadImageError, Stored, load, name_of
from linvit.data.transforms.decode import open_image
from linvit.errors import UserError, some
from linvit.ignore_index import IGNORE_INDEX

LOOKED_AT = 200  # masks of a larger set, spread evenly; it takes about a second
SHOWN = 6  # classes in a message


def check_masks(
    rows: datasets.Dataset,
    image: str,
    mask: str,
    reader: MaskReader,
    names: list[str] | None,
    exif_orientation: bool,
    split: str,
    source: str,
) -> None:
    """Holds masks to the classes and to the sizes of their images, and says how frequent the classes are.

    It warns of classes that occur in no mask of training, if all were looked at. Single files that cannot be read are
    left to training, which skips them or not.

    Args:
        rows: A table.
        image: Column of the images.
        mask: Column of the masks.
        reader: What reads masks.
        names: Of the classes, if they are known.
        exif_orientation: Whether images are turned as their EXIF entry says.
        split: Name of the split, for messages.
        source: The data source, for messages.

    Raises:
        UserError: If no mask can be read, values are no class, or a mask has not the size of its image.
    """
    files = rows.select_columns([image, mask])
    for column in (image, mask):
        files = files.cast_column(column, datasets.Image(decode=False))
    chosen = np.linspace(0, len(rows) - 1, min(len(rows), LOOKED_AT)).astype(int).tolist()
    found: Counter[int] = Counter()
    bad: list[BadImageError] = []
    for number in chosen:
        row = files[number]
        name = name_of(row[image], f"row {number}")
        label = name_of(row[mask], f"the mask of {name}")
        try:
            raw = reader.raw(row[mask], label)
        except BadImageError as error:
            bad.append(error)
            continue
        own = Counter(dict(zip(*counts(raw), strict=True)))
        found += own
        if unknown := reader.unknown(own):
            raise UserError(f"{label} in '{source}': {reader.complaint(unknown)}.{_hint(unknown, reader)}")
        size = _size(row[image], reader, exif_orientation)
        if size is not None and size != raw.shape:
            turned = ". Set --data.exif_orientation=false if masks are not turned" if size == raw.shape[::-1] else ""
            raise UserError(
                f"{label} in '{source}' has {raw.shape[1]} x {raw.shape[0]} pixels, but its image has {size[1]} x "
                f"{size[0]}{turned}"
            )
    if len(bad) == len(chosen):
        raise UserError(f"none of {len(bad)} masks of '{source}' can be read; {bad[0].name}: {bad[0].reason}")
    black_and_white = set(found) == {0, IGNORE_INDEX} and not reader.given
    if black_and_white and reader.num_classes > 1:
        raise UserError(
            f"the masks of '{source}' hold 0 and 255 only, and 255 is the label of ignored pixels; if they are black "
            f"and white for two classes, set --data.mask_values=[0,255]"
        )
    where = f"{len(chosen)} of the {len(rows)} {split} masks of '{source}'"
    absent = _report(found, reader, names, where)
    if absent and split == "train" and len(chosen) == len(rows):
        rank_zero_warn(f"{where}: no pixel is of the classes {some(absent)}")


def _hint(unknown: list[int], reader: MaskReader) -> str:
    if unknown == [reader.num_classes] and not reader.reduce_zero_label and not reader.given:
        return (
            " If the classes count from 1 and 0 is for pixels without a class, set --data.reduce_zero_label=true; else "
            f"there are {reader.num_classes + 1} classes (--data.num_classes)"
        )
    return " Mend the mask, or set --data.num_classes, --data.mask_values or --data.ignored_values"


def _size(stored: Stored, reader: MaskReader, exif_orientation: bool) -> tuple[int, int] | None:
    """Height and width of an image as training has it, by its header; None if that cannot be read."""
    try:
        with open_image(load(stored, reader.max_pixels, reader.on_hub)) as picture:
            turned = exif_orientation and picture.getexif().get(ExifTags.Base.Orientation, 1) >= 5
            return picture.size if turned else picture.size[::-1]
    except MemoryError:
        raise
    except Exception:  # a bad image is met, and counted, when it is used
        return None


def _report(found: Counter[int], reader: MaskReader, names: list[str] | None, where: str) -> list[str]:
    """Says how frequent the classes are; returns those that do not occur."""
    total = sum(found.values())
    meaning = dict(reader.meaning)
    pixels: Counter[int] = Counter()
    for value, count in found.items():
        pixels[meaning[reader.value(value)]] += count
    called = names or [str(index) for index in range(reader.num_classes)]
    ignored = pixels.pop(IGNORE_INDEX, 0)
    largest = ", ".join(f"{called[index]} {count / total:.1%}" for index, count in pixels.most_common(SHOWN))
    more = f" and {len(pixels) - SHOWN} more classes" if len(pixels) > SHOWN else ""
    rank_zero_info(f"{where}: {largest}{more}; ignored {ignored / total:.1%}")
    return [called[index] for index in range(reader.num_classes) if index not in pixels]
