"""Image files, wherever they are stored: loaded, checked by their header, decoded."""

import io
from typing import Any

import fsspec
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from linvit.data.transforms.decode import decode
from linvit.errors import UserError

MAX_ASPECT = 200  # a strip that is thinner would fill the memory when its short side is resized
MAX_PIXELS = 89_478_485  # from here on PIL warns of decompression bombs: a quarter of a gigabyte as RGB
Stored = dict[str, Any] | None
"""An undecoded image: {"bytes": ..., "path": ...}, either of which may be None; or nothing."""


class BadImageError(Exception):
    """An image that cannot be decoded, or is too large.

    Args:
        name: Its path, or where it is stored.
        reason: What is wrong with it.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason


def read(stored: Stored, name: str, max_pixels: int = MAX_PIXELS, exif_orientation: bool = True) -> Tensor:
    """Loads and decodes an image to 8-bit RGB (3, H, W).

    Args:
        stored: The image.
        name: What messages call it; see `name_of`.
        max_pixels: An image with more is refused before it is decoded.
        exif_orientation: Whether to turn the image as its EXIF entry says.

    Raises:
        BadImageError: If it cannot be read, is no whole image, or is too large or too thin.
    """
    try:
        data = load(stored)
        with Image.open(io.BytesIO(data)) as picture:  # reads no more than the header
            width, height = picture.size
        if width * height > max_pixels:
            raise OSError(f"{width} x {height} pixels are more than the limit, {max_pixels}")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise OSError(f"{width} x {height} pixels: one side is more than {MAX_ASPECT} times the other")
        return decode(data, exif_orientation)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise nearly anything on damaged files: SyntaxError, struct.error, ...
        raise BadImageError(name, reason_of(error)) from error


def check_max_pixels(max_pixels: int) -> int:
    """The limit, if PIL can hold to it.

    Raises:
        UserError: If it cannot.
    """
    if max_pixels < 1 or max_pixels > 2 * MAX_PIXELS:
        raise UserError(f"max_pixels must lie between 1 and {2 * MAX_PIXELS}, where PIL refuses; got {max_pixels}")
    return max_pixels


def load(stored: Stored) -> bytes:
    """The file of an image; a path may be an address that fsspec knows.

    Raises:
        OSError: If it cannot be read, is empty, or there is none.
    """
    data, path = _parts(stored)
    if data is None:
        if not path:
            raise OSError("no image: the cell is empty")
        with fsspec.open(path, "rb") if "://" in path else open(path, "rb") as file:
            data = file.read()
    if not data:
        raise OSError("an empty file")
    return data


def name_of(stored: Stored, place: str) -> str:
    """What messages call an image: its path, or where a table stores it ("row 3"), since paths may repeat there."""
    data, path = _parts(stored)
    return path if path and data is None else f"{place} ({path or 'stored in the table'})"


def reason_of(error: Exception) -> str:
    """What an error of loading or decoding says is wrong with the image, in one line."""
    if isinstance(error, BadImageError):
        return error.reason
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    text = error.strerror if isinstance(error, OSError) else None
    return " ".join((text or str(error) or type(error).__name__).split())


def _parts(stored: Stored) -> tuple[bytes | None, str | None]:
    return (stored["bytes"], stored["path"]) if stored else (None, None)
