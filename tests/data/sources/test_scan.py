"""The scan of a set, image by image."""

import io
import re

import datasets
import numpy as np
from PIL import Image

from linvit.data.sources.read import ImageReader
from linvit.data.sources.scan import ImageFinding, describe_bands, examine, scan
from linvit.data.transforms.decode import Bands
from tests.data.damaged import encoded, photo


def look(stored, reader):
    return examine({"image": stored}, 3, "image", "train", reader)


def test_an_image_is_described_as_it_is_stored():
    data = encoded(photo(0).convert("L"), "JPEG")
    found = look({"bytes": data, "path": "x"}, ImageReader(10**6))
    assert found == ImageFinding("train", "row 3 (x)", "", found.digest, ("JPEG of 1 x uint8",), (56, 48))
    assert len(found.digest) == 16


def test_what_training_does_to_an_image_is_counted(tmp_path):
    exif = Image.Exif()
    exif[274] = 6
    clear = io.BytesIO()
    photo(0).convert("RGBA").save(clear, "PNG", exif=exif)
    assert look({"bytes": clear.getvalue(), "path": None}, ImageReader()).kinds == (
        *("PNG of 3 x uint8", "turned by EXIF", "transparent, put on white"),
    )
    assert (
        "turned by EXIF" not in look({"bytes": clear.getvalue(), "path": None}, ImageReader(exif_orientation=False))[4]
    )
    black = encoded(Image.new("RGB", (8, 8)), "PNG")
    assert look({"bytes": black, "path": None}, ImageReader()).kinds == ("PNG of 3 x uint8", "of one colour")
    values = np.array([[np.nan, 0.5], [1, 0]], np.float32)
    half = encoded(Image.fromarray(values), "TIFF")
    assert look({"bytes": half, "path": None}, ImageReader(bands=Bands(None, ((0, 1),)))).kinds == (
        *("TIFF of 1 x float32", "with pixels that are not a number, made black"),
    )


def test_marks_of_missing_data_are_no_values_to_propose():
    values = np.tile(np.array([-3.4e38, 1, 2, 9], np.float32), (4, 1))
    rows = datasets.Dataset.from_dict(
        {"image": [{"bytes": encoded(Image.fromarray(values), "TIFF"), "path": None}]},
        features=datasets.Features({"image": datasets.Image()}),
    )
    (hint,) = re.findall(r"value_range=\[\[(\S+),(\S+)\]\]", describe_bands(rows, "image", ImageReader())[-1])
    assert (float(hint[0]), float(hint[1])) == (1, 9)
    assert Bands.parse(None, [float(end) for end in hint])


def test_copies_within_a_split_are_no_leak(tmp_path):
    rows = datasets.Dataset.from_dict(
        {"image": [{"bytes": encoded(photo(0), "PNG"), "path": None}] * 3},
        features=datasets.Features({"image": datasets.Image()}),
    )
    alone = scan({"train": rows}, "image", ImageReader(10**6), 0)
    assert alone.copies == []
    first = "train: row 0 (stored in the table)"
    assert alone.twins == [(first, f"train: row {row} (stored in the table)") for row in (1, 2)]
    both = scan({"train": rows, "val": rows.select([0])}, "image", ImageReader(10**6), 0)
    assert both.copies == [("train: row 0 (stored in the table)", "val: row 0 (stored in the table)")]


def test_rows_without_an_image_and_rows_of_one_path_are_told_apart():
    images = [{"bytes": encoded(photo(0), "PNG"), "path": "x.png"}, None, {"bytes": b"no image", "path": "x.png"}]
    rows = datasets.Dataset.from_dict({"image": images}, features=datasets.Features({"image": datasets.Image()}))
    found = scan({"train": rows}, "image", ImageReader(10**6), 0)
    assert [(bad.name, bad.reason) for bad in found.bad] == [
        ("row 1 (stored in the table)", "no image: the cell is empty"),
        ("row 2 (x.png)", "not an image of the formats JPEG, PNG, WEBP, GIF, BMP, TIFF, PPM, JPEG2000, AVIF"),
    ]
