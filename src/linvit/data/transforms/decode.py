"""Image files as pixels: what a header says, which bands are used and what of their values, and decoding."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2
from torch import Tensor
from torchvision.io import ImageReadMode

from linvit import rasters
from linvit.errors import UserError

TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
SAMPLES = {1: "uint", 2: "int", 3: "float", 5: "int", 6: "float"}  # tag SampleFormat; 5 and 6 are complex
RGB_MADE = (3, 5, 6)  # tag PhotometricInterpretation: a palette, CMYK and YCbCr, which become RGB
SIZ = b"\xff\x4f\xff\x51"  # how the codestream of JPEG 2000 begins
LEVELS = 255.0


class BandsError(OSError):
    """An image of more bands or bits than are asked for, which would be lost, or of too few."""


class Kind(NamedTuple):
    """What an image file holds, by its header; sides are as stored, and exchanged by an orientation from 5 on.

    An alpha channel counts as a band in TIFF and JPEG 2000. A progressive JPEG has several scans.
    """

    format: str
    width: int
    height: int
    bands: int
    dtype: str
    orientation: int
    progressive: bool = False

    @property
    def plain(self) -> bool:
        """Whether it becomes 8-bit RGB without loss."""
        return self.dtype == "uint8" and self.bands in (1, 3)


def kind_of_tiff(data: bytes) -> Kind:
    """Reads the header of a TIFF, which PIL refuses if it has four bands of 16 bits."""
    file = io.BytesIO(data)
    tags = ImageFileDirectory_v2(file.read(16 if b"+" in data[:4] else 8))
    file.seek(tags.next)
    tags.load(file)
    bits, samples, kind = max(tags.get(258, (1,))), tags.get(277, 1), SAMPLES.get(max(tags.get(339, (1,))), "uint")
    if tags.get(262) in RGB_MADE and samples <= 4:
        samples = 3
    dtype = f"{kind}{max(bits, 8)}"
    return Kind("TIFF", int(tags[256]), int(tags[257]), samples, dtype, tags.get(ExifTags.Base.Orientation, 1))


def kind_of(picture: Image.Image, data: bytes) -> Kind:
    """What an opened file that is not a TIFF holds; what PIL says of its mode hides more than 8 bits."""
    bands, bits = 1 if picture.mode[0] in "1LIF" and picture.mode != "LAB" else 3, 8
    if picture.format == "PNG":
        bits = max(data[24], 8)
    elif picture.format == "PPM":
        arguments = picture.tile[0][3] if picture.tile else None  # type: ignore[attr-defined]
        bits = 16 if isinstance(arguments, tuple) and arguments[-1] > 255 else 8
    elif picture.format == "AVIF":
        at = data.find(b"av1C")
        bits = 16 if at > 0 and data[at + 6] & 0x40 else 8
    elif picture.format == "JPEG2000":
        at = data.find(SIZ) + 40
        bands, bits = int.from_bytes(data[at : at + 2], "big"), max((data[at + 2] & 127) + 1, 8)
    if picture.mode[0] in "IF":  # PGM, whose 16 bits PIL has in 32, and PFM
        bits = 16
    dtype = "float32" if picture.mode == "F" else "uint8" if bits == 8 else "uint16"
    orientation, progressive = picture.getexif().get(ExifTags.Base.Orientation, 1), "progressive" in picture.info
    return Kind(str(picture.format), *picture.size, bands, dtype, orientation, progressive)


@dataclass(frozen=True)
class Bands:
    """The bands that become the channels of an image, from 1 on, and the values that become 0 and 1.

    `numbers` None takes an image as RGB. `ranges` has a pair for each channel, or one for all; None is for 8 bits.
    """

    numbers: tuple[int, ...] | None = None
    ranges: tuple[tuple[float, float], ...] | None = None

    def __post_init__(self) -> None:
        if self.numbers is not None and not (self.numbers and min(self.numbers) > 0):
            raise UserError(f"bands must list numbers from 1 on, such as [1, 2, 3]; got {list(self.numbers)}")
        if self.ranges is None:
            return
        if len(self.ranges) not in (1, self.channels):
            raise UserError(
                f"value_range has {len(self.ranges)} pairs for {self.channels} channels; give one pair, or one for each"
            )
        for low, high in self.ranges:
            if not low < high:
                raise UserError(f"value_range must be [low, high] with low below high; got [{low}, {high}]")

    @classmethod
    def parse(
        cls, bands: Sequence[int] | None, value_range: Sequence[float] | Sequence[Sequence[float]] | None
    ) -> "Bands":
        """Reads the options of the data modules: `value_range` is one pair, or a list of pairs."""
        numbers = None if bands is None else tuple(bands)
        if value_range is None:
            return cls(numbers)
        pairs = [pair if isinstance(pair, Sequence) else value_range for pair in value_range]
        pairs = pairs[:1] if pairs and pairs[0] is value_range else pairs
        if not pairs or any(len(pair) != 2 for pair in pairs):
            raise UserError(f"value_range must be [low, high], or a list of such pairs; got {value_range}")
        return cls(numbers, tuple((float(low), float(high)) for low, high in pairs))  # type: ignore[arg-type]

    @property
    def channels(self) -> int:
        """Channels of the images."""
        return 3 if self.numbers is None else len(self.numbers)

    @property
    def eight_bit_rgb(self) -> bool:
        """Whether images are three channels of 8 bits, on which operations on colours are defined."""
        return self.channels == 3 and self.ranges is None

    def check_colours(self, ops: Mapping[str, object]) -> None:
        """Raises a `UserError` if an operation on colours is switched on that these images do not allow."""
        for option, value in {} if self.eight_bit_rgb else ops.items():
            if value:
                off = "false" if value is True else "null" if isinstance(value, str) else "0"
                raise UserError(
                    f"augmentation.{option} changes colours, which is defined for three channels of 8 bits and not for "
                    f"{self.channels} channels{' with a value_range' if self.ranges else ''}; set "
                    f"--data.augmentation.{option}={off}. Defined for any bands are crops, flips, rotation, shifts, "
                    f"zoom, random erasing, mixup and CutMix"
                )

    def check(self, kind: Kind) -> None:
        """Raises a `BandsError` if bands or bits of a file would be lost, or a band is not there."""
        what = f"it has {kind.bands} band{'s' * (kind.bands != 1)} of {kind.dtype}"
        if self.numbers is None and kind.bands not in (1, 3):
            raise BandsError(
                f"{what}, and without --data.bands images have three. Say which are used and in which order, such as "
                f"--data.bands=[1,2,3]; a model takes any number of them. linvit data check prints what to set"
            )
        if self.numbers is not None and max(self.numbers) > kind.bands:
            raise BandsError(f"{what}; there is no band {max(self.numbers)} (--data.bands={list(self.numbers)})")
        if self.ranges is None and kind.dtype != "uint8":
            raise BandsError(
                f"{what}, and no file says which of its values are black and white. Set --data.value_range=[LOW,HIGH], "
                f"or a pair for each band; linvit data check prints the percentiles"
            )
        if kind.dtype == "uint8" and self.ranges is not None and max(high for _, high in self.ranges) > LEVELS:
            raise BandsError(
                f"{what}, whose values end at 255, but --data.value_range goes beyond: the images of a data source "
                f"must have values of one kind"
            )

    def take(self, values: np.ndarray) -> np.ndarray:
        """The channels of an image (bands, H, W), as stored, of a file that `check` has passed.

        Uint8 without a value range, else float32 from 0 to 255; what is not a number is 0.
        """
        if self.numbers is not None:
            values = values[[number - 1 for number in self.numbers]]
        elif len(values) == 1:
            values = np.repeat(values, 3, 0)
        if self.ranges is None:
            return np.ascontiguousarray(values, np.uint8)
        low, high = np.array(self.ranges, np.float64).T.reshape(2, -1, 1, 1)
        scaled = (values.astype(np.float32) - low.astype(np.float32)) * (LEVELS / (high - low)).astype(np.float32)
        return np.nan_to_num(scaled, copy=False, nan=0.0).clip(0, LEVELS)


JPEG = b"\xff\xd8\xff"
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""PIL's names of what is read. It knows many more, and some are not images but programs: EPS runs Ghostscript."""
STRIP = 2**22  # pixels that are converted at once: all of a large image would take four times its memory
BY_PIL = ("uint8", "uint16", "int16", "float32")  # what PIL reads as it is, of one band


def open_image(data: bytes) -> Image.Image:
    """Opens an image file of any of `FORMATS`, whatever its name says; no more than its header is read."""
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise OSError(f"not an image of the formats {', '.join(FORMATS)}") from error


def header(data: bytes) -> Kind:
    """What an image file holds; no more than its header is read."""
    if data[:4] in TIFF:
        return kind_of_tiff(data)
    with open_image(data) as picture:
        return kind_of(picture, data)


def stored_values(data: bytes, kind: Kind, exif_orientation: bool, name: str) -> np.ndarray:
    """The values (bands, H, W) of an image file as they are stored; a `UserError` if its format cannot be read so."""
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
