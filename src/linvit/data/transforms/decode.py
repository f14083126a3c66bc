"""From the bytes of an image file to pixels."""

import io

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.io import ImageReadMode, decode_jpeg

JPEG = b"\xff\xd8\xff"
WIDE = {"I": "32-bit integers", "F": "32-bit floats"}  # PIL's modes


def decode(data: bytes) -> Tensor:
    """An image file as 8-bit RGB (3, H, W), turned as the camera's EXIF entry says.

    JPEG goes straight to a tensor, everything else through PIL. The memory is laid out channels last, which is what
    cropping and resizing like.

    Raises:
        OSError: If it is no image, not a whole one, or of 32 bits per channel.
    """
    if not data.startswith(JPEG):
        picture = Image.open(io.BytesIO(data))
        check_range(picture)
        return torch.from_numpy(np.array(to_rgb(ImageOps.exif_transpose(picture)))).permute(2, 0, 1)
    try:
        # bytearray, because torch warns of memory that it cannot write to
        stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return decode_jpeg(stored, ImageReadMode.RGB, apply_exif_orientation=True)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise OSError(str(error).rpartition(", ")[2]) from error  # without the place in torchvision's source


def to_rgb(picture: Image.Image) -> Image.Image:
    """Any image of 8 or 16 bits as 8-bit RGB; 16-bit grey is scaled, which PIL's own conversion would clip to white."""
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture) / 257).astype(np.uint8))
    return picture.convert("RGB")


def check_range(picture: Image.Image) -> None:
    """Raises an `OSError` for pixels of 32 bits.

    Nothing in a file says which of their values is white, and a guess from the values would make a dark image bright.
    """
    if picture.mode in WIDE and (picture.mode, picture.format) != ("I", "PPM"):  # PGM's 16 bits come in 32
        raise OSError(f"its pixels are {WIDE[picture.mode]}, of no agreed range; save it with 8 or 16 bits per channel")
