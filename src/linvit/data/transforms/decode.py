"""Decodes the bytes of an image file to pixels."""

import functools
import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor

JPEG = b"\xff\xd8\xff"
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""PIL's names of what is read. It knows many more, and some are no images but programs: EPS runs Ghostscript."""
STRIP = 2**22  # pixels that are converted at once: all of a large image would take four times its memory
WIDE = {"I": "32-bit integers", "F": "32-bit floats"}  # PIL's modes


def open_image(data: bytes) -> Image.Image:
    """Opens an image file of any of `FORMATS`, whatever its name says; no more than its header is read."""
    return Image.open(io.BytesIO(data), formats=FORMATS)


def decode(data: bytes, exif_orientation: bool = True) -> Tensor:
    """Decodes an image file to 8-bit RGB (3, H, W), channels last in memory, which is faster to crop and resize.

    Args:
        data: The file.
        exif_orientation: Whether to turn the image as the camera's EXIF entry says.

    Raises:
        OSError: If it is no image, not a whole one, or of 32 bits per channel.
    """
    return (jpeg_decoder() if data.startswith(JPEG) else decode_with_pil)(data, exif_orientation)


@functools.cache
def jpeg_decoder() -> Callable[[bytes, bool], Tensor]:
    """Chooses torchvision's decoder, or PIL's (the same pixels) where torchvision has none.

    torchvision deprecates its decoder from 0.29 on. As long as it is there, ImageNet recipes load a tenth more images
    per second with it.
    """
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "JPEG")
    try:
        decode_with_torchvision(buffer.getvalue(), True)
    except (ImportError, AttributeError, RuntimeError, OSError):
        return decode_with_pil
    return decode_with_torchvision


def decode_with_torchvision(data: bytes, exif_orientation: bool) -> Tensor:
    """Decodes a JPEG file by torchvision; see `decode`.

    By its operator: the function around it warns of the deprecation each time, which users can do nothing about, and
    with which loading takes 2 % more time.
    """
    from torchvision.io import ImageReadMode

    try:
        # bytearray, because torch warns of memory that it cannot write to
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        image: Tensor = torch.ops.image.decode_jpeg(stored, ImageReadMode.RGB.value, exif_orientation)
    except RuntimeError as error:
        raise OSError(str(error).rpartition(", ")[2]) from error  # without the place in torchvision's source
    return image


def decode_with_pil(data: bytes, exif_orientation: bool) -> Tensor:
    """Decodes any image file by PIL; see `decode`."""
    picture = open_image(data)
    check_range(picture)
    if exif_orientation and picture.getexif().get(ExifTags.Base.Orientation, 1) != 1:
        picture = ImageOps.exif_transpose(picture)
    width, height = picture.size
    rows = STRIP // width + 1
    if rows >= height:
        return torch.from_numpy(np.array(to_rgb(picture))).permute(2, 0, 1)
    pixels = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, rows):
        pixels[top : top + rows] = np.asarray(to_rgb(picture.crop((0, top, width, min(top + rows, height)))))
    return torch.from_numpy(pixels).permute(2, 0, 1)


def to_rgb(picture: Image.Image) -> Image.Image:
    """Converts an image of 8 or 16 bits to 8-bit RGB; 16-bit grey is scaled, where PIL would clip it to white."""
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture) // 257).astype(np.uint8))
    return picture if picture.mode == "RGB" else picture.convert("RGB")  # a conversion would copy it


def check_range(picture: Image.Image) -> None:
    """Raises an `OSError` for pixels of 32 bits.

    Nothing in a file says which of their values is white, and a guess from the values would make a dark image bright.
    """
    if picture.mode in WIDE and (picture.mode, picture.format) != ("I", "PPM"):  # PGM's 16 bits come in 32
        raise OSError(f"its pixels are {WIDE[picture.mode]}, of no agreed range; save it with 8 or 16 bits per channel")
