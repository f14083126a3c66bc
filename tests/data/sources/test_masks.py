"""Masks of all kinds as classes, and what is wrong with those that are none."""

import io

import numpy as np
import pytest
from PIL import Image

from linvit.data.sources.masks import MaskReader
from linvit.data.sources.read import BadImageError
from linvit.errors import UserError
from tests.data import png
from tests.data.tiff import tiff

VALUES = np.array([[0, 1, 2], [3, 255, 0]], np.uint8)
RED, GREEN, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 0)


def file(picture, kind="PNG", **options):
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return {"bytes": buffer.getvalue(), "path": None}


def palette(values):
    picture = Image.fromarray(values, "P")
    picture.putpalette([9, 8, 7] * 256)  # all look alike, so colours cannot be told apart
    return picture


def read(stored, *arguments, **options):
    return MaskReader(*arguments, **options)(stored, "7.jpg").tolist()


def complaint(stored, *arguments, **options):
    with pytest.raises(BadImageError) as caught:
        read(stored, *arguments, **options)
    assert "7.jpg" in caught.value.name
    return caught.value.reason


GREY = Image.fromarray(VALUES)
KINDS = {
    "grey": file(GREY),
    "palette": file(palette(VALUES)),
    "16 bits": file(Image.fromarray(VALUES.astype(np.uint16))),
    "32 bits": file(Image.fromarray(VALUES.astype(np.int32)), "TIFF"),
    "tiff": file(GREY, "TIFF"),
    "grey as RGB": file(GREY.convert("RGB")),
    "grey with alpha": file(GREY.convert("LA")),
    "palette of which one is transparent": file(palette(VALUES), transparency=2),
    "TIFF LZW": file(GREY, "TIFF", compression="tiff_lzw"),
    "PGM": file(GREY, "PPM"),
    "BMP": file(GREY, "BMP"),
}
FEW = np.array([[0, 1, 2, 1], [2, 0, 3, 1], [1, 1, 0, 2]], np.uint8)


def tiff_of_bits(bits, white=255):
    """A grey TIFF of few bits; `white` 0 has 0 be white."""
    rows = b"".join(np.packbits(np.unpackbits(row[:, None], axis=1)[:, 8 - bits :].ravel()).tobytes() for row in FEW)
    size = {256: 4, 257: 3, 258: bits, 277: 1}
    return tiff(size | {259: 1, 262: int(white > 0), 273: 8, 278: 3, 279: len(rows)}, rows)


FEW_BITS = {
    **{f"PNG of {bits} bits": png.of_samples(FEW[..., None], bits, 0) for bits in (2, 4, 8)},
    **{
        f"PNG of {bits} bits, interlaced": png.of_samples(FEW[..., None], bits, 0, interlaced=True)
        for bits in (2, 4, 8, 16)
    },
    **{
        f"PNG palette of {bits} bits": png.of_samples(FEW[..., None], bits, 3, png.chunk(b"PLTE", bytes(12)))
        for bits in (2, 4)
    },
    "PGM up to 3": b"P5 4 3 3\n" + FEW.tobytes(),
    "PGM up to 3, as text": b"P2 4 3 3\n" + " ".join(map(str, FEW.ravel())).encode() + b"\n",
    "PGM up to 300": b"P5 4 3 300\n" + FEW.astype(">u2").tobytes(),
    "TIFF of 2 bits": tiff_of_bits(2),
    "TIFF of 4 bits": tiff_of_bits(4),
}


@pytest.mark.parametrize("stored", KINDS.values(), ids=KINDS)
def test_kinds_of_files(stored):
    assert read(stored, 4) == VALUES.tolist()


@pytest.mark.parametrize("data", FEW_BITS.values(), ids=FEW_BITS)
def test_numbers_are_those_of_the_file_whatever_viewers_stretch(data):
    assert read({"bytes": data, "path": None}, 150) == FEW.tolist()


def test_large_numbers_of_pgm():
    data = b"P5 2 1 1000\n" + np.array([999, 1000], ">u2").tobytes()
    assert read({"bytes": data, "path": None}, 2, values=[999, 1000]) == [[0, 1]]


def test_black_and_white():
    picture = Image.fromarray(VALUES > 0)
    assert picture.mode == "1"
    assert read(file(picture), 2) == (VALUES > 0).astype(int).tolist()


def test_a_zero_label_is_reduced_once():
    assert read(file(GREY), 3, reduce_zero_label=True) == [[255, 0, 1], [2, 255, 255]]


def test_values_of_one_s_own():
    assert read(file(GREY), 2, values=[1, 3], ignored=[0, 2]) == [[255, 0, 255], [1, 255, 255]]
    white = np.array([[0, 255]], np.uint8)
    assert read(file(Image.fromarray(white)), 2, values=[0, 255]) == [[0, 1]]
    wide = np.array([[1000, 40000]], np.uint16)
    assert read(file(Image.fromarray(wide)), 2, values=[40000, 1000]) == [[1, 0]]


def test_colours():
    pixels = np.array([[RED, GREEN], [BLACK, RED]], np.uint8)
    for picture in (
        Image.fromarray(pixels),
        Image.fromarray(pixels).convert("RGBA"),
        Image.fromarray(pixels).quantize(3),
    ):
        assert read(file(picture), 2, values=[RED, GREEN], ignored=[BLACK]) == [[0, 1], [255, 0]]
    reason = complaint(file(Image.fromarray(pixels)), 2, values=[RED, GREEN])
    assert "colours (0, 0, 0) are not classes" in reason


class TestBad:
    def test_colours_without_a_table(self):
        pixels = np.array([[RED, GREEN]], np.uint8)
        assert "--data.mask_values" in complaint(file(Image.fromarray(pixels)), 2)

    @pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
    def test_lossy(self, kind):
        assert f"saved as {kind}" in complaint(file(GREY, kind), 4)

    def test_lossy_within_a_tiff(self):
        assert "saved as TIFF with lossy compression" in complaint(file(GREY, "TIFF", compression="jpeg"), 4)

    @pytest.mark.parametrize(("channels", "colour"), [(2, 4), (3, 2), (4, 6)])
    def test_colours_of_16_bits(self, channels, colour):
        """Pillow reads the upper 8 bits, so that the classes 0 to 255 would all be 0."""
        data = png.of_samples(np.repeat(FEW[..., None], channels, -1), 16, colour)
        assert "up to 65535 in place of 255" in complaint({"bytes": data, "path": None}, 4)

    def test_colours_of_few_levels(self):
        data = b"P6 4 3 3\n" + np.repeat(FEW[..., None], 3, -1).tobytes()
        assert "up to 3 in place of 255" in complaint({"bytes": data, "path": None}, 4)

    def test_a_tiff_whose_0_is_white(self):
        assert "0 is white" in complaint({"bytes": tiff_of_bits(4, white=0), "path": None}, 4)

    def test_values_outside(self):
        reason = complaint(file(GREY), 3)
        assert "values 3 are not classes (3 classes: 0 to 2; ignored: 255)" in reason
        reason = complaint(file(GREY), 2, reduce_zero_label=True)
        assert "values 3 are not classes (2 classes: 1 to 2; ignored: 0, 255)" in reason
        wide = Image.fromarray(np.array([[0, 700]], np.uint16))
        assert "values 700" in complaint(file(wide), 2)
        assert "from 0 to 70000" in complaint(file(Image.fromarray(np.array([[0, 70000]], np.int32)), "TIFF"), 2)

    def test_floats(self):
        assert "kind F" in complaint(file(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF"), 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 255}, "1 to 254"),
        ({"num_classes": 2, "values": [0]}, "1 values for 2 classes"),
        ({"num_classes": 2, "values": [1, 1]}, "different"),
        ({"num_classes": 2, "values": [1, (1, 2, 3)]}, "different"),
        ({"num_classes": 2, "values": [1, 2], "ignored": [2]}, "different"),
        ({"num_classes": 2, "values": [1, 2], "reduce_zero_label": True}, "reduce_zero_label is false"),
    ],
    ids=str,
)
def test_options_are_checked(arguments, message):
    with pytest.raises(UserError, match=message):
        MaskReader(**arguments)
