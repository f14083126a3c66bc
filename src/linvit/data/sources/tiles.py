"""Large pictures with masks, cut into tiles that keep their bands, their bits and their georeference."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from linvit.data.sources.masks import UNKNOWN, MaskReader, changed, grey_numbers
from linvit.data.sources.pairs import Folders, by_split, by_stem, pairs
from linvit.data.sources.read import MAX_PIXELS, ImageReader
from linvit.data.sources.splits import readable_source
from linvit.data.transforms.decode import Kind, header, open_image, stored_values
from linvit.errors import UserError, quote_first
from linvit.ignore_index import IGNORE_INDEX
from linvit.io.rasters import georeference, write_tiff

MODES = ("1", "L", "P", "RGB", "I;16")
"""PIL's modes of masks that a PNG has as they are."""
LARGE = ImageReader(2 * MAX_PIXELS)
MOST = 2**33  # bytes of the values of a picture


class Area(NamedTuple):
    """A picture, its mask, and the split that it belongs to."""

    name: str
    split: str
    image: str
    mask: str


def find_areas(images: Path, masks: Path, suffix: str, val: Collection[str], test: Collection[str]) -> list[Area]:
    """Returns pictures and masks of two folders, by folders of splits or by the stems in `val` and `test`."""
    for folder in (images, masks):
        if not folder.is_dir():
            raise UserError(f"folder '{folder}' does not exist")
    found = by_split(images, masks)
    if found and (val or test):
        raise UserError(f"'{images}' has folders of splits ({', '.join(found)}); leave --val and --test out")
    areas: dict[tuple[str, str], Area] = {}  # by what tiles are called
    stems = set()
    for split, folders in (found or {"train": Folders(images, masks)}).items():
        if folders.masks is None:
            raise UserError(f"the pictures in '{folders.images}' have no folder of masks in '{masks}'")
        rows = pairs(folders, suffix, split).with_format("arrow")[:]
        columns = [[cell["path"] for cell in rows[name].to_pylist()] for name in ("image", "mask")]
        for image, mask in zip(*columns, strict=True):
            stem = Path(image).relative_to(folders.images.absolute()).with_suffix("").as_posix()
            chosen = "test" if stem in test else "val" if stem in val else split
            area = Area(stem.replace("/", "_"), chosen, image, mask)
            if (other := areas.setdefault((chosen, area.name), area)) is not area:
                raise UserError(f"tiles of '{other.image}' and '{image}' would both be called {area.name}; rename one")
            stems.add(stem)
    if unknown := [name for name in (*val, *test) if name not in stems]:
        raise UserError(f"there is no picture '{unknown[0]}' in '{images}'; it has {quote_first(sorted(stems), 10)}")
    return [*areas.values()]


def read_mask(path: str) -> Image.Image:
    """Returns a mask as it is stored: numbers of 8 or 16 bits, a palette, or colours."""
    with readable_source(path):
        data = LARGE.load({"bytes": None, "path": path})
        _ = upright_kind(data, path)
        picture = open_image(data)
        if reason := changed(picture, data):
            raise UserError(f"'{path}' cannot be cut: {reason}")
        picture.load()
        if picture.mode in ("L", "I"):
            return Image.fromarray(grey_numbers(picture, data))
    if picture.mode not in MODES:
        raise UserError(
            f"'{path}' is not a mask: its pixels are of the kind {picture.mode}; known are {', '.join(MODES)}"
        )
    return picture


def upright_kind(data: bytes, path: str) -> Kind:
    """Returns the kind of a file; raises a `UserError` if viewers rotate it, since tiles would not be rotated."""
    kind = header(data)
    if kind.orientation != 1:
        raise UserError(f"'{path}' is turned by its EXIF tag ({kind.orientation}); save it upright, without the tag")
    return kind


def cut(area: Area, mask: Image.Image, size: int, stride: int, output: Path) -> int:
    """Writes the tiles of a picture to `SPLIT/images` and of its mask to `SPLIT/masks`; returns how many there are.

    The last training tiles of a row or column are shifted inwards; those of validation and test do not overlap. Tiles
    are PNG, or GeoTIFF where the picture has a georeference, or bands that a PNG does not have.
    """
    with readable_source(area.image):
        data = LARGE.load({"bytes": None, "path": area.image})
        kind, place = upright_kind(data, area.image), georeference(area.image)
        values = stored_values(data, kind, False, area.image, MOST)
    if mask.size != (values.shape[2], values.shape[1]):
        raise UserError(
            f"'{area.mask}' has {mask.width} x {mask.height} pixels, but '{area.image}' "
            f"{values.shape[2]} x {values.shape[1]}"
        )
    as_png = place is None and (kind.plain or (kind.bands == 1 and kind.dtype == "uint16"))
    for folder in ("images", "masks"):
        (output / area.split / folder).mkdir(parents=True, exist_ok=True)
    training, count = area.split == "train", 0
    step = stride if training else size
    for top in offsets(mask.height, size, step, shift=training):
        for left in offsets(mask.width, size, step, shift=training):
            part, name = values[:, top : top + size, left : left + size], f"{area.name}_{top}_{left}"
            target = output / area.split / "images" / f"{name}.{'png' if as_png else 'tif'}"
            if as_png:
                Image.fromarray(np.ascontiguousarray(part[0] if len(part) == 1 else part.transpose(1, 2, 0))).save(
                    target
                )
            else:
                write_tiff(target, part, None if place is None else place.of_window(top, left))
            box = left, top, min(left + size, mask.width), min(top + size, mask.height)
            mask.crop(box).save(output / area.split / "masks" / f"{name}.png")
            count += 1
    return count


def offsets(length: int, size: int, stride: int, shift: bool) -> Iterator[int]:
    """Yields the offsets of tiles along an axis; `shift` aligns the last tile with the end of a larger picture."""
    for start in range(0, max(length - size + stride, 1), stride):
        if start < length:
            yield max(min(start, length - size), 0) if shift else start


ISPRS_COLOURS = ((255, 255, 255), (0, 0, 255), (0, 255, 255), (0, 255, 0), (255, 255, 0), (255, 0, 0))
"""Impervious surfaces, building, low vegetation, tree, car, clutter: the order of `class_names/isprs.txt`."""
BOUNDARY = (0, 0, 0)  # pixels about the edges, which eroded masks leave out
STRAY = 0.01  # fraction of the pixels of a picture that may have other colours, as some of Potsdam's have


class AerialSet(NamedTuple):
    """A set: a pattern whose group is the area in the name of a file, and the areas of validation and test."""

    area: str
    val: frozenset[str]
    test: frozenset[str]


VAIHINGEN_TEST = "2 4 6 8 10 12 14 16 20 22 24 27 29 31 33 35 38"
POTSDAM_TEST = "2_13 2_14 3_13 3_14 4_13 4_14 4_15 5_13 5_14 5_15 6_13 6_14 6_15 7_13"
SETS = {
    "vaihingen": AerialSet(r"area(\d+)", frozenset({"30"}), frozenset(VAIHINGEN_TEST.split())),
    "potsdam": AerialSet(r"potsdam_(\d+_\d+)", frozenset({"2_10"}), frozenset(POTSDAM_TEST.split())),
}


def isprs_areas(of: AerialSet, images: Path, masks: Path, eval_masks: Path | None = None) -> list[Area]:
    """Returns the pictures of a set with their masks; those of validation and test may be others: eroded ones."""
    folders = dict.fromkeys((images, masks, eval_masks or masks))
    found = {folder: by_stem(folder, pattern=of.area) for folder in folders}
    for folder, own in found.items():
        if not own:
            raise UserError(f"no image in '{folder}' has a name of this set, which matches the pattern {of.area}")
    chosen = []
    for name, image in found[images].items():
        split = "test" if name in of.test else "val" if name in of.val else "train"
        folder = masks if split == "train" else eval_masks or masks
        if name not in found[folder]:
            areas = quote_first(sorted(found[folder]), 40)
            raise UserError(f"'{image}' ({split}) has no mask in '{folder}', which has the areas {areas}")
        chosen.append(Area(name, split, image, found[folder][name]))
    return chosen


def read_classes(path: str) -> tuple[Image.Image, int]:
    """Returns a colour-coded mask as numbers with the set's palette, and the number of ignored stray pixels."""
    reader = MaskReader(len(ISPRS_COLOURS), values=[*ISPRS_COLOURS], ignored=[BOUNDARY])
    with readable_source(path):
        mask = reader.classify(reader.raw({"bytes": None, "path": path}, path))
    stray = mask == UNKNOWN
    if stray.mean() > STRAY:
        raise UserError(f"'{path}' is not a mask of this set: {stray.mean():.0%} of its pixels have other colours")
    mask[stray] = IGNORE_INDEX
    picture = Image.fromarray(mask, "P")
    picture.putpalette([*np.array(ISPRS_COLOURS).flatten().tolist(), *[0] * 3 * (256 - len(ISPRS_COLOURS))])
    return picture, int(stray.sum())
