"""Scan of every image of a dataset: format, whether it can be decoded, duplicates, values of bands."""

import hashlib
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import datasets
import numpy as np
from torch.utils.data import DataLoader
from tqdm import tqdm

from linvit.data.sources.labels import undecoded
from linvit.data.sources.read import RGB, ImageReader, name_of, reason_of
from linvit.data.transforms.decode import LEVELS, RANGE, Bands, header, stored_values
from linvit.errors import UserError

TURNED = "turned by EXIF"
CHUNK = 32  # images that a process hands over at once
T = TypeVar("T")
Look = Callable[[Mapping[str, Any], int], T]
"""Function that inspects a row with its number."""


class ImageFinding(NamedTuple):
    """Image of a split, by its path or row: the reason why it is bad, or its kinds, (H, W) and a hash."""

    split: str
    name: str
    reason: str = ""
    digest: bytes = b""
    kinds: tuple[str, ...] = ()
    size: tuple[int, int] = (0, 0)


class ScanResult:
    """Summary of all images: numbers for each split and kind, bad images, and duplicates.

    `sizes` has (H, W) of all images of each split, in the order of their rows, and (0, 0) of those that are bad.
    """

    def __init__(self) -> None:
        self.images: Counter[str] = Counter()
        self.bad: list[ImageFinding] = []
        self.kinds: Counter[str] = Counter()
        self.turned: list[tuple[str, str]] = []  # split and name
        self.copies: list[tuple[str, str]] = []  # in two splits
        self.twins: list[tuple[str, str]] = []  # in one split
        self.sizes: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._first: dict[bytes, ImageFinding] = {}  # by digest

    def add(self, found: ImageFinding) -> None:
        """Counts one image."""
        self.images[found.split] += 1
        self.sizes[found.split].append(found.size)
        if found.reason:
            self.bad.append(found)
            return
        self.kinds.update(found.kinds)
        if TURNED in found.kinds:
            self.turned.append((found.split, found.name))
        first = self._first.setdefault(found.digest, found)
        if first is not found:
            pairs = self.twins if first.split == found.split else self.copies
            pairs.append((f"{first.split}: {first.name}", f"{found.split}: {found.name}"))

    def lines(self) -> list[str]:
        """Returns lines with the kinds and sizes of the images."""
        sizes = np.array([size for own in self.sizes.values() for size in own if any(size)] or [(0, 0)]).T
        kinds = ", ".join(f"{name} {count:,}" for name, count in self.kinds.most_common()) or "none"
        return [f"  {'formats':<10}{kinds}"] + [
            f"  {side:<10}{own.min()} to {own.max()}, median {int(np.median(own))}"
            for side, own in zip(("height", "width"), sizes, strict=True)
        ]


def look_at(rows: datasets.Dataset, look: Look[T], workers: int) -> Iterator[T]:
    """Yields the finding of each row, from `workers` processes besides this one."""
    numbers: Any = range(len(rows))
    found = DataLoader(numbers, CHUNK, num_workers=workers, collate_fn=partial(_look_at_each, rows=rows, look=look))
    return chain.from_iterable(found)


def _look_at_each(numbers: list[int], rows: datasets.Dataset, look: Look[T]) -> list[T]:
    return [look(rows[number], number) for number in numbers]


def scan(splits: Mapping[str, datasets.Dataset], image: str, reader: ImageReader, workers: int) -> ScanResult:
    """Examines every image, in so many processes besides this one; splits are compared for copies in their order."""
    found = ScanResult()
    findings = (
        look_at(undecoded(rows, image), partial(examine, image=image, split=split, reader=reader), workers)
        for split, rows in splits.items()
    )
    for finding in tqdm(chain.from_iterable(findings), total=sum(map(len, splits.values())), unit=" images"):
        found.add(finding)
    return found


def examine(row: Mapping[str, Any], number: int, image: str, split: str, reader: ImageReader) -> ImageFinding:
    """Examines the header of an image, and decodes it as training does."""
    name, digest = name_of(row[image], f"row {number}"), b""
    try:
        data = reader.load(row[image])
        digest = hashlib.blake2b(data, digest_size=16).digest()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's about large images and odd metadata
            pixels = reader.read({"bytes": data, "path": None}, name)
            kind, unknown = header(data), False
            if kind.dtype.startswith("float"):
                unknown = bool(
                    np.isnan(stored_values(data, kind, False, name, reader.most, reader.bands.numbers)).any()
                )
    except MemoryError:
        raise
    except Exception as error:  # a damaged file makes PIL raise nearly anything
        return ImageFinding(split, name, reason_of(error), digest)
    noted = {
        TURNED: reader.exif_orientation and kind.orientation != 1,
        "transparent, put on white": kind.transparent and kind.plain,
        "of one colour": bool((pixels == pixels[:, :1, :1]).all()),
        "with pixels that are not a number, made black": unknown,
    }
    kinds = (f"{kind.format} of {kind.bands} x {kind.dtype}", *(what for what, so in noted.items() if so))
    return ImageFinding(split, name, "", digest, kinds, (pixels.shape[1], pixels.shape[2]))


IMAGES_SAMPLED = 200  # that are looked at, spread evenly over a set
PIXELS_SAMPLED = 4096  # of each
PERCENTILES = {"least": 0, "0.5 %": 0.5, "median": 50, "99.5 %": 99.5, "largest": 100}


def describe_bands(rows: datasets.Dataset, image: str, reader: ImageReader) -> list[str]:
    """Returns lines with the percentiles of each band, and the options that fit them beside those already given.

    They are of images spread evenly over a table, without unreadable images and those that fit the given options.
    """
    rows, bands = undecoded(rows, image), reader.bands
    found: dict[tuple[int, str], list[np.ndarray]] = defaultdict(list)
    for number in np.linspace(0, len(rows) - 1, min(len(rows), IMAGES_SAMPLED)).astype(int).tolist():
        try:
            data = reader.load(rows[number][image])
            kind = header(data)
            if kind.width * kind.height > reader.max_pixels or (kind.plain and bands == RGB):
                continue
            values = stored_values(data, kind, False, f"of row {number}", reader.most)
        except (MemoryError, UserError):
            raise
        except Exception:  # a damaged file, which is listed among the bad images
            continue
        if not np.isfinite(values).any():
            continue  # such an image is bad
        places = np.random.default_rng(number).integers(values[0].size, size=PIXELS_SAMPLED)
        found[len(values), kind.dtype].append(values.reshape(len(values), -1)[:, places])
    if not found:
        return []
    kinds = Counter({kind: len(own) for kind, own in found.items()}).most_common()
    sampled, dtype = np.concatenate(found[kinds[0][0]], 1), kinds[0][0][1]  # (bands, n), of the most frequent kind
    lines = [f"  bands     {', '.join(f'{count} of {kind} ({n:,} images)' for (count, kind), n in kinds)}"]
    numbers = bands.numbers or tuple(range(1, len(sampled) + 1))
    if max(numbers) > len(sampled):
        return [*lines, f"  NO BAND   {max(numbers)}"]
    lines.append(f"  {'band':>6}" + "".join(f"{name:>12}" for name in PERCENTILES))
    ranges, eight_bits = [], dtype == "uint8"
    for number in numbers:
        band = sampled[number - 1].astype(np.float64)
        known = band[np.abs(band) < RANGE[1]]  # without no-data values
        row = np.percentile(known if len(known) else [0.0, 1.0], [*PERCENTILES.values()])
        lines.append(f"  {number:>6}" + "".join(f"{value:>12.5g}" for value in row))
        ends = (0.0, LEVELS) if eight_bits else (row[1], row[3] if row[3] > row[1] else row[1] + 1)
        ranges.append((float(f"{ends[0]:.4g}"), float(f"{ends[1]:.4g}")))
    options = {"bands": ",".join(map(str, numbers))}
    used = bands.ranges or tuple(ranges)
    if not eight_bits or bands.ranges is not None:
        options["value_range"] = ",".join(f"[{low:g},{high:g}]" for low, high in used)
    scaled = Bands(numbers, used if len(used) == len(numbers) else used[:1]).take(sampled[:, None]) / LEVELS
    options["mean"] = ",".join(f"{value:.3f}" for value in scaled.mean((1, 2)))
    options["std"] = ",".join(f"{value:.3f}" for value in scaled.std((1, 2)).clip(1e-3))
    return [*lines, f"  options   {' '.join(f'--data.{name}=[{value}]' for name, value in options.items())}"]
