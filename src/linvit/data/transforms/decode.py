"""Decoding of image files: headers, selection of bands, value ranges, and pixels."""

import io
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from PIL import ExifTags, Image, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2
from torch import Tensor
from torchvision.io import ImageReadMode

from linvit.errors import UserError
from linvit.io import rasters

TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
SAMPLES = {1: "uint", 2: "int", 3: "float", 5: "int", 6: "float"}  # tag SampleFormat; 5 and 6 are complex
RGB_MADE = {3: 1, 5: 4, 6: 3}  # tag PhotometricInterpretation: samples of a palette, CMYK and YCbCr, which become RGB
MAX_BLOCK = 2**24  # pixels of a tile of a TIFF, whatever the size of the image
SIZ = b"\xff\x4f\xff\x51"  # how the codestream of JPEG 2000 begins
LEVELS = 255.0
RANGE = (
    1e-30,
    1e30,
)  # widths of a value range that float32 can scale; larger values mark missing data, such as -3.4e38
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"
START_OF_SCAN, END_OF_IMAGE = b"\xda", b"\xd9"
MARKER = re.compile(rb"\xff([^\x00\x01\xd0-\xd7\xff])")  # of JPEG, with a length behind it
MAX_SCANS = 100  # of a JPEG file: each takes as long as the image has pixels; libtiff has the same limit
TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # chunks of a PNG that may say the orientation, also behind the pixels
XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
TURNED_BACK = {6: 8, 8: 6}  # orientations that undo others; the rest undo themselves


class BandsError(OSError):
    """An image with more bands or bits than requested, which would be lost, or with too few."""


class Kind(NamedTuple):
    """Kind of an image, from its file's header; sides are as stored, and exchanged by an orientation from 5 on.

    The orientation is 1 to 8, as in EXIF. An image of 8 bits that is `transparent` is composited on white; in TIFF,
    JPEG 2000 and with more bits, an alpha channel counts as a band.
    """

    format: str
    width: int
    height: int
    bands: int
    dtype: str
    orientation: int
    transparent: bool = False

    @property
    def plain(self) -> bool:
        """True if the image converts to 8-bit RGB without loss."""
        return self.dtype == "uint8" and self.bands in (1, 3)

    @property
    def bytes(self) -> int:
        """Bytes of a value."""
        return -(-int("".join(filter(str.isdigit, self.dtype))) // 8)


def orientation(tag: Any, xmp: Any = None) -> int:
    """Returns the orientation, 1 to 8, of an EXIF tag, or without one of XMP; 1 if there is none or it is invalid."""
    if tag is None and xmp:
        found = XMP_ORIENTATION.search(xmp if isinstance(xmp, bytes) else str(xmp).encode())
        tag = found and int(found[1])
    return next((turn for turn in range(2, 9) if turn == tag), 1)


def orientation_of(picture: Image.Image) -> int:
    """Returns the orientation of an opened image, 1 to 8, wherever its file says it; 1 if the entry is damaged."""
    try:
        return orientation(Image.Image.getexif(picture).get(ExifTags.Base.Orientation))  # PNG's own decodes the image
    except Exception:  # anything, as PIL's readers of EXIF raise it; viewers show such an image as it is stored
        return 1


def upright(values: np.ndarray, turn: int) -> np.ndarray:
    """Turns values (..., H, W) as an orientation says; a view."""
    if turn >= 5:
        values = values.swapaxes(-1, -2)
    return values[..., :: -1 if turn in (3, 4, 7, 8) else 1, :: -1 if turn in (2, 3, 6, 7) else 1]


def turn_after_pil(kind: Kind, exif_orientation: bool) -> int:
    """Returns the orientation by which to turn pixels that PIL has decoded; PIL turns a TIFF while it decodes it."""
    if kind.format != "TIFF":
        return kind.orientation if exif_orientation else 1
    return 1 if exif_orientation else TURNED_BACK.get(kind.orientation, kind.orientation)


def kind_of_tiff(data: bytes) -> Kind:
    """Reads the header of a TIFF, which PIL refuses if it has four bands of 16 bits."""
    file = io.BytesIO(data)
    tags = ImageFileDirectory_v2(file.read(16 if b"+" in data[:4] else 8))
    file.seek(tags.next)
    tags.load(file)
    width, height, block = int(tags[256]), int(tags[257]), (tags.get(322, 0), tags.get(323, 0))
    if block[0] * block[1] > max(MAX_BLOCK, width * height):
        raise OSError(f"tiles of {block[0]} x {block[1]} pixels for an image of {width} x {height}")
    bits, samples, kind = max(tags.get(258, (1,))), tags.get(277, 1), SAMPLES.get(max(tags.get(339, (1,))), "uint")
    if RGB_MADE.get(tags.get(262, 0)) == samples:
        samples = 3
    turn = orientation(tags.get(ExifTags.Base.Orientation), tags.get(700))
    return Kind("TIFF", width, height, samples, f"{kind}{max(bits, 8)}", turn)


def white_of(picture: Image.Image, data: bytes) -> tuple[int, int]:
    """Returns the value of white in an opened image: as PIL reads it, and as stored in the file.

    PIL stretches grey values of 2 and 4 bits and of PGM, and takes 8 of the 16 bits of a colour.
    """
    shown, kind, details = 65535 if picture.mode[0] == "I" else 255, picture.format, cast("Any", picture)
    if kind == "PPM" and picture.mode != "1" and details.tile and isinstance(details.tile[0][3], tuple):
        return shown, details.tile[0][3][-1]
    if kind == "PNG" and picture.mode not in ("1", "P"):
        return shown, 2 ** data[24] - 1
    if kind == "TIFF" and picture.mode[0] in "LR":
        return shown, 2 ** max(details.tag_v2.get(258, (1,))) - 1
    return shown, shown


def kind_of(picture: Image.Image, data: bytes) -> Kind:
    """Returns the kind of an opened file other than TIFF; PIL's mode does not show more than 8 bits."""
    bands, bits = 1 if picture.mode[0] in "1LIF" and picture.mode != "LAB" else 3, 8
    if white_of(picture, data)[1] > LEVELS:
        bits = 16
        if picture.format == "PNG":
            bands = (3 if data[25] & 2 else 1) + picture.has_transparency_data
    elif picture.format == "AVIF":
        at = data.find(b"av1C")
        bits = 16 if at > 0 and data[at + 6] & 0x40 else 8
    elif picture.format == "JPEG2000":
        at = data.find(SIZ) + 40
        bands, bits = int.from_bytes(data[at : at + 2], "big"), max((data[at + 2] & 127) + 1, 8)
    if picture.mode[0] in "IF":  # PGM, whose 16 bits PIL has in 32, and PFM
        bits = 16
    dtype = "float32" if picture.mode == "F" else "uint8" if bits == 8 else "uint16"
    name = "JPEG" if picture.format == "MPO" else str(picture.format)  # a JPEG with another behind it
    return Kind(name, *picture.size, bands, dtype, orientation_of(picture), picture.has_transparency_data)


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
            if not (np.isfinite([low, high]).all() and RANGE[0] < high - low < RANGE[1]):
                raise UserError(
                    f"value_range [{low:g}, {high:g}] makes all pixels alike or overflows float32; give the values "
                    f"that are black and white (linvit data check prints the percentiles)"
                )

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
        """True if images have three channels of 8 bits, as operations on colours require."""
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
        """Returns the channels of an image (bands, H, W), as stored, of a file that `check` has passed; see `scale`."""
        return self.scale(values if self.numbers is None else values[[number - 1 for number in self.numbers]])

    def scale(self, values: np.ndarray) -> np.ndarray:
        """Returns the channels (C, H, W) of an image whose chosen bands have these values; an `OSError` if all are NaN.

        Uint8 without a value range, else float32 from 0 to 255; NaN becomes 0.
        """
        if values.dtype.kind == "f" and not np.isfinite(values).any():
            raise OSError("all of its values are NaN or infinite")
        if self.numbers is None and len(values) == 1:
            values = np.repeat(values, 3, 0)
        if self.ranges is None:
            return np.ascontiguousarray(values, np.uint8)
        low, high = np.array(self.ranges, np.float64).T.reshape(2, -1, 1, 1)
        scaled = values.astype(np.float32)  # the one copy of a large image
        scaled -= low.astype(np.float32)
        scaled *= (LEVELS / (high - low)).astype(np.float32)
        np.nan_to_num(scaled, copy=False, nan=0.0)
        return scaled.clip(0, LEVELS, out=scaled)


FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
"""PIL's names of the accepted formats. PIL has more, some of them are programs: EPS runs Ghostscript."""
STRIP = 2**22  # pixels that are converted at once: all of a large image would take four times its memory
BY_PIL = ("uint8", "uint16", "int16", "float32")  # what PIL reads as it is, of one band


def open_image(data: bytes) -> Image.Image:
    """Opens an image file of any of `FORMATS`, whatever its name says; no more than its header is read."""
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise OSError(f"not an image of the formats {', '.join(FORMATS)}") from error
    if picture.format == "PNG" and picture.mode == "L" and "transparency" in picture.info:
        picture.info["transparency"] *= 255 // (2 ** data[24] - 1)  # PIL stretches the pixels of few bits alone
    return picture


def header(data: bytes) -> Kind:
    """Returns the kind of an image file without decoding pixels; raises an `OSError` for a JPEG of too many scans."""
    if data[:4] in TIFF:
        return kind_of_tiff(data)
    if (
        data.startswith(JPEG)
        and data.count(b"\xff" + START_OF_SCAN) > MAX_SCANS
        and (scans := _scans(data)) > MAX_SCANS
    ):
        raise OSError(f"a JPEG file of {scans:,} scans, where encoders write about 10; save it again")
    with open_image(_without_pixels(data) if data.startswith(PNG) else data) as picture:
        return kind_of(picture, data)


def _scans(data: bytes) -> int:
    """Returns the number of scans of a JPEG file, without those of thumbnails and of data after its end."""
    scans, at = 0, 2
    while (found := MARKER.search(data, at)) and found[1] != END_OF_IMAGE:
        scans += found[1] == START_OF_SCAN
        at = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
    return scans


def _without_pixels(data: bytes) -> bytes:
    """Returns a PNG file without its pixels, to read the metadata behind them without decoding."""
    kept, at, pixels = [], len(PNG), False
    while at < len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4])
        kind = data[at + 4 : at + 8]
        pixels |= kind == b"IDAT"
        intact = kind in TEXTS and zlib.crc32(data[at + 4 : end - 4]).to_bytes(4) == data[end - 4 : end]
        if intact or not pixels:
            kept.append(data[at:end])
        at = end
    return PNG + b"".join(kept) + b"\0\0\0\0IEND\xaeB`\x82"


def stored_values(
    data: bytes, kind: Kind, exif_orientation: bool, name: str, most: int, numbers: Sequence[int] | None = None
) -> np.ndarray:
    """Returns the values (bands, H, W) of an image file as they are stored, of all bands or of some, from 1 on.

    A `UserError` if its format cannot be read so, an `OSError` if they have more than `most` bytes.
    """
    count = len(numbers or range(kind.bands))
    size = kind.width * kind.height * count * kind.bytes
    if size > most:
        raise OSError(
            f"{kind.width} x {kind.height} pixels of {count} bands of {kind.dtype} are {size:,} bytes, more than the "
            f"limit, {most:,}: choose fewer --data.bands, or cut it into tiles (linvit data tile)"
        )
    if kind.plain:
        values = decode(data, exif_orientation, kind).numpy()[: kind.bands]  # of a grey image one of three alike
    elif kind.bands == 1 and kind.dtype in BY_PIL:
        values = upright(np.array(open_image(data)), turn_after_pil(kind, exif_orientation))[None]
        values = values.astype(kind.dtype, copy=False)
    elif kind.format in rasters.DRIVERS:
        values = rasters.read_values(data, kind.format, name, most, numbers)
        return upright(values, kind.orientation if exif_orientation else 1)
    else:
        raise UserError(
            f"image {name}: a {kind.format} of {kind.dtype} cannot be read as it is; save it as TIFF or PNG"
        )
    return values if numbers is None else values[[number - 1 for number in numbers]]


def decode(data: bytes, exif_orientation: bool = True, kind: Kind | None = None) -> Tensor:
    """Decodes an image file to 8-bit RGB (3, H, W), channels last in memory, which is faster to crop and resize.

    The `header` of the file must be `plain`: nothing is scaled here. It raises an `OSError` if it is not a whole image.
    """
    kind = kind or header(data)
    if data.startswith(JPEG) and hasattr(torch.ops.image, "decode_jpeg"):
        # The same pixels in two thirds of PIL's time. torchvision's function around its operator warns each time.
        try:
            stored = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            planes: Tensor = torch.ops.image.decode_jpeg(stored, ImageReadMode.RGB.value, False)
        except RuntimeError as error:
            raise OSError(str(error).rpartition(", ")[2]) from error  # without the place in torchvision's source
        turn = kind.orientation if exif_orientation else 1
    else:
        planes = torch.from_numpy(_pixels(open_image(data))).permute(2, 0, 1)
        turn = turn_after_pil(kind, exif_orientation)
    if turn == 1:
        return planes
    turned = upright(planes.numpy(), turn).transpose(1, 2, 0)  # (H, W, 3)
    return torch.from_numpy(np.ascontiguousarray(turned)).permute(2, 0, 1)


def _pixels(picture: Image.Image) -> np.ndarray:
    """Returns the pixels (H, W, 3) of an opened image of 8 bits as RGB, as PIL decodes it."""
    picture.load()
    width, height = picture.size
    rows = STRIP // width + 1
    if rows >= height:
        return np.array(to_rgb(picture))
    pixels = np.empty((height, width, 3), np.uint8)
    for top in range(0, height, rows):
        pixels[top : top + rows] = np.asarray(to_rgb(picture.crop((0, top, width, min(top + rows, height)))))
    return pixels


def to_rgb(picture: Image.Image) -> Image.Image:
    """Converts an 8-bit image to RGB, transparency on white; returns an RGB image as it is, without a copy."""
    if picture.has_transparency_data:
        white = Image.new("RGB", picture.size, "white")
        white.paste(shown := picture.convert("RGBA"), mask=shown)
        return white
    return picture if picture.mode == "RGB" else picture.convert("RGB")
