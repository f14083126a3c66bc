"""Looks at every image of a set: what it is, whether it can be decoded, whether it is there twice; values of bands."""

import argparse
import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import datasets
import numpy as np
from PIL import ExifTags
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from linvit.data.sources.read import RGB, ImageReader, Stored, name_of, reason_of
from linvit.data.transforms.bands import LEVELS, TIFF, Bands
from linvit.data.transforms.decode import header, open_image, stored_values
from linvit.errors import UserError

CHUNK = 32  # images that a process hands over at once


class ImageFinding(NamedTuple):
    """One image of a split, by its path or row, and why it is bad, or what it is: its kind, (width, height), a hash."""

    split: str
    name: str
    reason: str = ""
    digest: bytes = b""
    kinds: tuple[str, ...] = ()
    size: tuple[int, int] = (0, 0)


class ScanResult:
    """The sums of what was found in all images: how many are of each split and kind, those that are bad, and copies."""

    def __init__(self) -> None:
        self.images: Counter[str] = Counter()
        self.bad: list[ImageFinding] = []
        self.kinds: Counter[str] = Counter()
        self.copies: list[tuple[str, str]] = []
        self._sizes: list[tuple[int, int]] = []
        self._first: dict[bytes, tuple[str, str]] = {}  # digest -> split and name of the first

    def add(self, found: ImageFinding) -> None:
        """Counts one image."""
        self.images[found.split] += 1
        if found.reason:
            self.bad.append(found)
            return
        self.kinds.update(found.kinds)
        self._sizes.append(found.size)
        split, name = self._first.setdefault(found.digest, (found.split, found.name))
        if split != found.split:
            self.copies.append((f"{split}: {name}", f"{found.split}: {found.name}"))

    def lines(self) -> list[str]:
        """What kinds of images there are and how large, in lines."""
        sizes = np.array(self._sizes or [(0, 0)]).T
        kinds = ", ".join(f"{name} {count:,}" for name, count in self.kinds.most_common()) or "none"
        return [f"  {'formats':<10}{kinds}"] + [
            f"  {side:<10}{own.min()} to {own.max()}, median {int(np.median(own))}"
            for side, own in zip(("width", "height"), sizes, strict=True)
        ]


class _Rows(Dataset[ImageFinding]):
    """The rows of one split; an image is examined when its row is read."""

    def __init__(self, rows: datasets.Dataset, image: str, split: str, reader: ImageReader) -> None:
        self.rows = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        self.image, self.split, self.reader = image, split, reader

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> ImageFinding:
        stored = self.rows[index][self.image]
        return examine(stored, self.split, name_of(stored, f"row {index}"), self.reader)


def scan(splits: Mapping[str, datasets.Dataset], image: str, reader: ImageReader, workers: int) -> ScanResult:
    """Examines every image, in so many processes besides this one; splits are compared for copies in their order."""
    found = ScanResult()
    with tqdm(total=sum(map(len, splits.values())), unit=" images") as bar:
        for split, rows in splits.items():
            examined = _Rows(rows, image, split, reader)
            for findings in DataLoader(examined, CHUNK, num_workers=workers, collate_fn=list):
                for finding in findings:
                    found.add(finding)
                bar.update(len(findings))
    return found


def examine(stored: Stored, split: str, name: str, reader: ImageReader) -> ImageFinding:
    """Looks at one image with the decoder of training, and at what its file says beyond the pixels."""
    digest = b""
    try:
        data = reader.load(stored)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's about large images and odd metadata
            reader.read({"bytes": data, "path": None}, name)
            if data[:4] in TIFF and reader.bands != RGB:  # PIL may not open it
                kind = header(data)
                kinds: tuple[str, ...] = (f"{kind.format} of {kind.bands} x {kind.dtype}",)
                return ImageFinding(split, name, "", digest, kinds, (kind.width, kind.height))
            with open_image(data) as picture:
                kinds = (f"{picture.format} {picture.mode}",)
                if picture.getexif().get(ExifTags.Base.Orientation, 1) not in (0, 1):
                    kinds += ("turned by EXIF",)
                if getattr(picture, "is_animated", False):
                    kinds += ("of several frames",)
                return ImageFinding(split, name, "", digest, kinds, picture.size)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file makes PIL raise nearly anything, in reading its frames and tags too
        return ImageFinding(split, name, reason_of(error), digest)


IMAGES_SAMPLED = 200  # that are looked at, spread evenly over a set
PIXELS_SAMPLED = 4096  # of each
PERCENTILES = (0, 0.5, 50, 99.5, 100)


class BandValues(NamedTuple):
    """How many images of a sample have so many bands of which type, and values (bands, n) of the most frequent kind."""

    kinds: Counter[tuple[int, str]]
    values: np.ndarray


def json_list(text: str) -> list[Any]:
    """An option of a command line that is a list."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise argparse.ArgumentTypeError(f"must be a list without spaces, such as [1,2,3]; got {text}")
    return found


def band_values(rows: datasets.Dataset, image: str, reader: ImageReader) -> BandValues:
    """Looks at images spread evenly over a table; those that cannot be read, or are what is asked for, are left out."""
    rows = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
    kinds: Counter[tuple[int, str]] = Counter()
    found: dict[tuple[int, str], list[np.ndarray]] = {}
    for number in np.linspace(0, len(rows) - 1, min(len(rows), IMAGES_SAMPLED)).astype(int).tolist():
        try:
            data = reader.load(rows[number][image])
            kind = header(data)
            if kind.width * kind.height > reader.max_pixels or (kind.plain and reader.bands == RGB):
                continue
            values = stored_values(data, kind, False, f"of row {number}")
        except (MemoryError, UserError):
            raise
        except Exception:  # a damaged file, which is listed among the bad images
            continue
        key = len(values), kind.dtype
        kinds[key] += 1
        places = np.random.default_rng(number).integers(values[0].size, size=PIXELS_SAMPLED)
        found.setdefault(key, []).append(values.reshape(len(values), -1)[:, places])
    return BandValues(kinds, np.concatenate(found[kinds.most_common(1)[0][0]], 1) if kinds else np.zeros((0, 0)))


def describe_bands(found: BandValues, bands: Bands) -> list[str]:
    """Lines with the percentiles of each band, and the options that fit them beside what is asked for already."""
    if not found.kinds:
        return []
    kinds = ", ".join(f"{count} of {dtype} ({n:,} images)" for (count, dtype), n in found.kinds.most_common())
    lines = [f"  bands     {kinds}"]
    numbers = bands.numbers or range(1, len(found.values) + 1)
    if max(numbers) > len(found.values):
        return [*lines, f"  NO BAND   {max(numbers)}"]
    lines.append(
        f"  {'band':>6}" + "".join(f"{name:>12}" for name in ("least", "0.5 %", "median", "99.5 %", "largest"))
    )
    used = [found.values[number - 1].astype(np.float64) for number in numbers]
    table = [np.percentile(band[np.isfinite(band)], PERCENTILES) if np.isfinite(band).any() else None for band in used]
    for number, row in zip(numbers, table, strict=True):
        shown = ["no number"] if row is None else [f"{value:.5g}" for value in row]
        lines.append(f"  {number:>6}" + "".join(f"{value:>12}" for value in shown))
    ranges = bands.ranges
    (_, dtype), options = found.kinds.most_common(1)[0][0], [f"--data.bands=[{','.join(map(str, numbers))}]"]
    if ranges is None and dtype == "uint8":
        ranges = ((0.0, LEVELS),)
    elif ranges is None:
        ends = [(0.0, 1.0) if row is None else (row[1], row[3] if row[3] > row[1] else row[1] + 1) for row in table]
        ranges = tuple((float(f"{low:.4g}"), float(f"{high:.4g}")) for low, high in ends)
    if dtype != "uint8" or bands.ranges is not None:
        options.append(f"--data.value_range=[{','.join(f'[{low:g},{high:g}]' for low, high in ranges)}]")
    scaled = (
        Bands(tuple(numbers), ranges if len(ranges) == len(used) else ranges[:1]).take(found.values[:, None]) / LEVELS
    )
    for name, statistic in (("mean", scaled.mean((1, 2))), ("std", scaled.std((1, 2)).clip(1e-3))):
        options.append(f"--data.{name}=[{','.join(f'{value:.3f}' for value in statistic)}]")
    return [*lines, f"  options   {' '.join(options)}"]
