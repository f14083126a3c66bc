"""Image files, wherever they are stored: loaded, checked by their header, decoded."""

import os
import re
import stat
from dataclasses import dataclass
from typing import Any

import fsspec
import torch
from PIL import UnidentifiedImageError
from torch import Tensor

from linvit.data.transforms.bands import Bands, Kind
from linvit.data.transforms.decode import FORMATS, decode, header, stored_values
from linvit.errors import UserError
from linvit.plain_text import printable

MAX_ASPECT = 200  # a strip that is thinner would fill the memory when its short side is resized
MAX_PIXELS = 89_478_485  # from here on PIL warns of decompression bombs: a quarter of a gigabyte as RGB
HEAVY = {"WEBP", "JPEG2000"}  # formats whose decoders take twice the memory of others: half the pixels are allowed
MAX_SCANS = 100  # of a progressive JPEG file: each takes as long as the image has pixels; libtiff has the same limit
MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")  # of JPEG, with a length behind it
OVERHEAD = 2**26  # bytes of a file that need not be pixels
ARCHIVES = {"zip", "gzip", "tar"}  # on the hub, in which the images of a hub set may lie

RGB = Bands()
"""An image of 8 bits, as three channels."""
Stored = dict[str, Any] | None
"""An undecoded image: {"bytes": ..., "path": ...}, either of which may be None; or nothing."""


class BadImageError(Exception):
    """An image that cannot be decoded, or is too large: its path, or where it is stored, and what is wrong with it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason


@dataclass(frozen=True)
class ImageReader:
    """Reads image files, and refuses what would take too much memory or time before it is decoded."""

    max_pixels: int = MAX_PIXELS  # images with more are refused, WebP and JPEG 2000 with more than half as many
    exif_orientation: bool = True  # images are turned as their EXIF entry says
    on_hub: bool = False  # the images belong to a set of the hub, and may lie there
    bands: Bands = RGB  # what is taken of an image

    def __post_init__(self) -> None:
        if not 1 <= self.max_pixels <= 2 * MAX_PIXELS:
            raise UserError(
                f"max_pixels must lie between 1 and {2 * MAX_PIXELS}, where PIL refuses; got {self.max_pixels}"
            )

    def load(self, stored: Stored) -> bytes:
        """The file of an image. A path in data is a file of this machine, or of the hub if the data lie there."""
        data, path = _parts(stored)
        if data is None:
            if not path:
                raise OSError("no image: the cell is empty")
            data = _remote(path, self.on_hub) if "://" in path else _local(path, OVERHEAD + 8 * self.max_pixels)
        if not data:
            raise OSError("an empty file")
        return data

    def read(self, stored: Stored, name: str) -> Tensor:
        """Loads an image, checks its header, and decodes it to 8-bit RGB (3, H, W), or to the chosen bands (C, H, W).

        A `BadImageError` has the name, if it is damaged, too large, or has other bands.
        """
        try:
            data = self.load(stored)
            kind = header(data)
            if kind.progressive and (scans := _scans(data)) > MAX_SCANS:
                raise OSError(f"a JPEG file of {scans:,} scans, where encoders write about 10; save it again")
            self.check(kind)
            if self.bands == RGB:
                return decode(data, self.exif_orientation)
            return torch.from_numpy(self.bands.take(stored_values(data, kind, self.exif_orientation, name)))
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

    def size(self, stored: Stored) -> tuple[int, int] | None:
        """Height and width of an image as `read` would make it, by its header; None if that cannot be read."""
        try:
            kind = header(self.load(stored))
        except MemoryError:
            raise
        except Exception:  # a bad image is met, and counted, when it is used
            return None
        turned = self.exif_orientation and kind.orientation >= 5
        return (kind.width, kind.height) if turned else (kind.height, kind.width)


def _scans(data: bytes) -> int:
    """The scans of a JPEG file, without those of thumbnails and of what follows its end."""
    scans, at = 0, 2
    while (found := MARKER.search(data, at)) and found[1] != b"\xd9":
        scans += found[1] == b"\xda"
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
    return scans


def _local(path: str, largest: int) -> bytes:
    """A regular file: others, such as pipes and devices, may have no end."""
    found = os.stat(path)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):  # open() refuses a folder
        raise OSError("not a regular file")
    if found.st_size > largest:
        raise OSError(f"{found.st_size} bytes are more than an image of max_pixels has")
    with open(path, "rb") as file:
        return file.read()


def _remote(path: str, on_hub: bool) -> bytes:
    *archives, last = [part.partition("://")[0] for part in path.split("::")]
    if not on_hub or last != "hf" or not ARCHIVES.issuperset(archives):
        where = "on the hub or this machine" if on_hub else "on this machine"
        raise OSError(f"an address, which is not fetched: the images of this data source are files {where}")
    with fsspec.open(path, "rb") as file:
        return file.read()  # type: ignore[no-any-return]


def name_of(stored: Stored, place: str) -> str:
    """What messages call an image: its path, or where a table stores it ("row 3"), since paths may repeat there."""
    data, path = _parts(stored)
    return printable(path if path and data is None else f"{place} ({path or 'stored in the table'})", lines=False)


def reason_of(error: Exception) -> str:
    """What an error of loading or decoding says is wrong with the image, in one line."""
    if isinstance(error, BadImageError):
        return error.reason
    if isinstance(error, UnidentifiedImageError):
        return f"not an image of the formats {', '.join(FORMATS)}"
    text = error.strerror if isinstance(error, OSError) else None
    return printable(" ".join((text or str(error) or type(error).__name__).split()))


def _parts(stored: Stored) -> tuple[bytes | None, str | None]:
    return (stored["bytes"], stored["path"]) if stored else (None, None)
