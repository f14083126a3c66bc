"""Masks of all kinds as classes, and what is wrong with those that are none."""

import io

import numpy as np
import pytest
from PIL import Image

from linvit.data.sources.masks import MaskReader
from linvit.data.sources.read import BadImageError, ImageReader
from linvit.errors import UserError

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
}


@pytest.mark.parametrize("stored", KINDS.values(), ids=KINDS)
def test_kinds_of_files(stored):
    assert read(stored, 4) == VALUES.tolist()


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

    def test_no_image(self):
        assert complaint({"bytes": b"no image", "path": None}, 2).startswith("not an image")
        assert "more than 5" in complaint(file(GREY), 4, images=ImageReader(5))


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
