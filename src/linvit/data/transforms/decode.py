"""Decodes the bytes of an image file to pixels."""

import io

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps
from torch import Tensor
from torchvision.io import ImageReadMode

from linvit import rasters
from linvit.data.transforms.bands import TIFF, Kind, kind_of, kind_of_tiff
from linvit.errors import UserError

JPEG = b"\xff\xd8\xff"
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""PIL's names of what is read. It knows many more, and some are not images but programs: EPS runs Ghostscript."""
STRIP = 2**22  # pixels that are converted at once: all of a large image would take four times its memory
BY_PIL = ("uint8", "uint16", "int16", "float32")  # what PIL reads as it is, of one band


def open_image(data: bytes) -> Image.Image:
    """Opens an image file of any of `FORMATS`, whatever its name says; no more than its header is read."""
    return Image.open(io.BytesIO(data), formats=FORMATS)


def header(data: bytes) -> Kind:
    """What an image file holds; no more than its header is read."""
    if data[:4] in TIFF:
        return kind_of_tiff(data)
    with open_image(data) as picture:
        return kind_of(picture, data)


def stored_values(data: bytes, kind: Kind, exif_orientation: bool, name: str) -> np.ndarray:
    """The values (bands, H, W) of an image file as they are stored.

    A `UserError` says if those of a format cannot be read.
    """
    if kind.plain:
        planes = decode(data, exif_orientation).numpy()
        return planes[: kind.bands]  # of a grey image one of three that are alike
    if kind.bands == 1 and kind.dtype in BY_PIL:
        picture = open_image(data)
        values = np.array(ImageOps.exif_transpose(picture) if exif_orientation else picture)
        return values[None].astype(kind.dtype, copy=False)
    if kind.format not in rasters.DRIVERS:
        raise UserError(
            f"image {name}: a {kind.format} of {kind.dtype} cannot be read as it is; save it as TIFF or PNG"
        )
    values = rasters.read_values(data, kind.format, name)
    turn = kind.orientation if exif_orientation else 1
    if turn >= 5:
        values = values.swapaxes(1, 2)
    return values[:, :: -1 if turn in (3, 4, 7, 8) else 1, :: -1 if turn in (2, 3, 6, 7) else 1]


def decode(data: bytes, exif_orientation: bool = True) -> Tensor:
    """Decodes an image file to 8-bit RGB (3, H, W), channels last in memory, which is faster to crop and resize.

    The `header` of the file must be `plain`: nothing is scaled here. It raises an `OSError` if it is not a whole image.
    """
    if data.startswith(JPEG) and hasattr(torch.ops.image, "decode_jpeg"):
        # The same pixels in two thirds of PIL's time. torchvision's function around its operator warns each time.
        try:
            stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            jpeg: Tensor = torch.ops.image.decode_jpeg(stored, ImageReadMode.RGB.value, exif_orientation)
        except RuntimeError as error:
            raise OSError(str(error).rpartition(", ")[2]) from error  # without the place in torchvision's source
        return jpeg
    picture = open_image(data)
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
    """Converts an image of 8 bits to RGB; a conversion of an RGB image would copy it."""
    return picture if picture.mode == "RGB" else picture.convert("RGB")
