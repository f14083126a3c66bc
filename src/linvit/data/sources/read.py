"""Image files, local or on the hub: loading, checks of the header, decoding, and counting of unreadable ones."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import fsspec
import torch
from filelock import FileLock
from torch import Tensor

from linvit.data.loading.sampler import sample_seed
from linvit.data.transforms.decode import Bands, Kind, decode, header, stored_values
from linvit.errors import UserError, check_choice
from linvit.io.files import make_folder
from linvit.io.plain_text import printable, read_csv, write_csv
from linvit.io.reading import read_regular

MAX_ASPECT = 200  # a strip that is thinner would fill the memory when its short side is resized
MAX_PIXELS = 89_478_485  # from here on PIL warns of decompression bombs: a quarter of a gigabyte as RGB
HEAVY = {"WEBP", "JPEG2000"}  # formats whose decoders take twice the memory of others: half the pixels are allowed
PIXEL = 8  # bytes that a pixel of a large image may take, in the file and decoded
OVERHEAD = 2**26  # bytes of a file that need not be pixels
ARCHIVES = {"zip", "gzip", "tar"}  # archives on the hub that may contain the images of a hub dataset

RGB = Bands()
"""An image of 8 bits, as three channels."""
Stored = dict[str, Any] | None
"""An undecoded image: {"bytes": ..., "path": ...}, where either may be None; or None."""


class BadImageError(Exception):
    """An image that cannot be decoded, or is too large: its path or place in a table, and the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason


@dataclass(frozen=True)
class ImageReader:
    """Reads image files, and refuses what would take too much memory or time before it is decoded."""

    max_pixels: int = MAX_PIXELS  # images with more are refused, WebP and JPEG 2000 with more than half as many
    exif_orientation: bool = True  # images are turned as their EXIF entry says
    on_hub: bool = False  # the images belong to a hub dataset, and may be stored there
    bands: Bands = RGB  # channels to read

    def __post_init__(self) -> None:
        if not 1 <= self.max_pixels <= 2 * MAX_PIXELS:
            raise UserError(
                f"max_pixels must be between 1 and {2 * MAX_PIXELS}, where PIL refuses; got {self.max_pixels}"
            )

    @property
    def most(self) -> int:
        """Bytes that the values of an image may have."""
        return PIXEL * self.max_pixels

    def load(self, stored: Stored) -> bytes:
        """Returns the bytes of an image file: a local file, or one on the hub if the data is stored there."""
        data, path = _parts(stored)
        if data is None:
            if not path:
                raise OSError("no image: the cell is empty")
            data = _remote(path, self.on_hub) if "://" in path else read_regular(path, OVERHEAD + self.most)
        if not data:
            raise OSError("an empty file")
        return data

    def read(self, stored: Stored, name: str) -> Tensor:
        """Loads an image, checks its header, and decodes it to 8-bit RGB (3, H, W), or to the chosen bands (C, H, W).

        Raises a `BadImageError` with the name, if the image is too large, damaged, or has other bands.
        """
        try:
            data = self.load(stored)
            kind = header(data)
            self.check(kind)
            if self.bands == RGB:
                return decode(data, self.exif_orientation, kind)
            options = (self.exif_orientation, name, self.most, self.bands.numbers)
            return torch.from_numpy(self.bands.scale(stored_values(data, kind, *options)))
        except (MemoryError, UserError):
            raise
        except Exception as error:  # decoders raise nearly anything on damaged files: SyntaxError, struct.error, ...
            raise BadImageError(name, reason_of(error)) from error

    def check(self, kind: Kind) -> None:
        """Raises an `OSError` if an image is too large or too thin, or has other bands."""
        width, height = kind.width, kind.height
        heavy = kind.format in HEAVY
        limit, of_format = (self.max_pixels // 2, f" for {kind.format}") if heavy else (self.max_pixels, "")
        if width * height > limit:
            raise OSError(f"{width} x {height} pixels are more than the limit{of_format}, {limit}")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise OSError(f"{width} x {height} pixels: one side is more than {MAX_ASPECT} times the other")
        self.bands.check(kind)

    def kind(self, stored: Stored) -> Kind | None:
        """Returns the kind of an image from its header; None if the header cannot be read."""
        try:
            return header(self.load(stored))
        except MemoryError:
            raise
        except Exception:  # a bad image is met, and counted, when it is used
            return None

    def turn(self, kind: Kind) -> int:
        """Returns the orientation by which an image is turned, 1 for none."""
        return kind.orientation if self.exif_orientation else 1

    def size(self, stored: Stored) -> tuple[int, int] | None:
        """Returns height and width of an image after `read`, from its header; None if it cannot be read."""
        kind = self.kind(stored)
        if kind is None:
            return None
        return (kind.width, kind.height) if self.turn(kind) >= 5 else (kind.height, kind.width)


def _remote(path: str, on_hub: bool) -> bytes:
    *archives, last = [part.partition("://")[0] for part in path.split("::")]
    if not on_hub or last != "hf" or not ARCHIVES.issuperset(archives):
        where = "on the hub or this machine" if on_hub else "on this machine"
        raise OSError(f"an address, which is not fetched: the images of this data source are files {where}")
    with fsspec.open(path, "rb") as file:
        return file.read()  # type: ignore[no-any-return]


def name_of(stored: Stored, place: str) -> str:
    """Returns the name of an image in messages: its path, or its row in a table, where paths may repeat ("row 3")."""
    data, path = _parts(stored)
    return printable(path if path and data is None else f"{place} ({path or 'stored in the table'})", lines=False)


def reason_of(error: Exception) -> str:
    """Returns the reason of a loading or decoding error, in one line."""
    if isinstance(error, BadImageError):
        return error.reason
    text = error.strerror if isinstance(error, OSError) else None
    return printable(" ".join((text or str(error) or type(error).__name__).split()))


def _parts(stored: Stored) -> tuple[bytes | None, str | None]:
    return (stored["bytes"], stored["path"]) if stored else (None, None)


ALWAYS_ALLOWED = 5  # images that any max_fraction above 0 allows to skip: one image is much of a small set
ATTEMPTS = 100  # replacements in a row that are tried before the data itself must be at fault
Policy = Literal["raise", "skip"]


class BadImages:
    """Refuses or replaces images that cannot be decoded, at most a fraction of the dataset.

    The report has a line per image, written by all loader processes, ranks and resumed runs; the lines are counted.
    Without a report, outside of a run, each process counts alone.
    """

    def __init__(self, policy: Policy, max_fraction: float = 0.0) -> None:
        check_choice("bad_images", policy, get_args(Policy))
        if not 0 <= max_fraction <= 1:
            raise UserError(f"max_bad_fraction must be between 0 and 1, such as 0.001; got {max_fraction}")
        self.policy = policy
        self.max_fraction = max_fraction
        self.report: Path | None = None
        self.images = 0
        self._named = set[str]()

    def start(self, images: int) -> None:
        """Starts counting for a set of so many images."""
        self.images, self._named = images, set()

    def allowed_of(self, total: int) -> int:
        """Returns how many of `total` images may be skipped."""
        return max(ALWAYS_ALLOWED if self.max_fraction else 0, math.floor(self.max_fraction * total))

    def record(self, bad: BadImageError) -> None:
        """Writes a bad image to the report; raises a `UserError` if it is not skipped."""
        if self.policy == "raise":
            raise UserError(f"image {bad.name} cannot be decoded: {bad.reason}. Replace or remove it") from bad
        different, allowed = self._add(bad), self.allowed_of(self.images)
        if different > allowed:
            listed = f" They are listed in '{self.report}'." if self.report else ""
            raise UserError(
                f"{different} of the {self.images} training images cannot be decoded, and more may follow; the last "
                f"is {bad.name} ({bad.reason}). At most {allowed} are skipped "
                f"(--data.max_bad_fraction={self.max_fraction}).{listed} Replace or remove them (linvit data check "
                f"PATH finds them all), or raise the fraction"
            ) from bad

    def named(self) -> set[str]:
        """Returns the names of the images that were skipped."""
        if self.report is None or not self.report.exists():
            return self._named
        return {*read_csv(self.report, "image", lambda row: row["image"])}

    def sample_or_other(self, sample: Callable[[int, int], Any], row: int, seed: int, length: int) -> Any:
        """Returns the sample of a row or, after a `BadImageError`, of another of `length` rows, chosen by the seed."""
        chosen = row
        for attempt in range(ATTEMPTS):
            try:
                return sample(chosen, seed)
            except BadImageError as error:
                self.record(error)
                chosen = sample_seed(seed, attempt) % length
        raise UserError(f"cannot decode any of {ATTEMPTS} images, drawn in place of row {row}")

    def _add(self, bad: BadImageError) -> int:
        """Appends a line to the report unless it names the image; returns how many it names."""
        name = printable(bad.name, lines=False)
        if self.report is None:
            self._named.add(name)
            return len(self._named)
        make_folder(self.report.parent)
        with FileLock(self.report.with_name(f".{self.report.name}.lock")):
            if name not in (names := self.named()):
                with self.report.open("a", newline="", encoding="utf-8") as file:
                    write_csv(file, ([] if names else [("image", "reason")]) + [(name, bad.reason)])
            return len(names | {name})
