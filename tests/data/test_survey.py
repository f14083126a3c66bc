"""The survey of a set, image by image."""

import datasets

from linvit.data.survey import Finding, examine, survey
from tests.data.damaged import encoded, photo


def test_an_image_is_described_as_it_is_stored():
    data = encoded(photo(0).convert("L"), "JPEG")
    found = examine({"bytes": data, "path": None}, "train", "x", 10**6)
    assert found == Finding("train", "x", "", found.digest, "JPEG", "L", 48, 56)
    assert len(found.digest) == 16


def test_a_file_that_cannot_be_read_has_a_reason():
    assert examine({"bytes": None, "path": "/nowhere/x.jpg"}, "val", "x", 1) == Finding(
        "val", "x", "No such file or directory"
    )


def test_copies_within_a_split_are_no_leak(tmp_path):
    rows = datasets.Dataset.from_dict(
        {"image": [{"bytes": encoded(photo(0), "PNG"), "path": None}] * 3},
        features=datasets.Features({"image": datasets.Image()}),
    )
    assert survey({"train": rows}, "image", 10**6, 0, progress=False).copies == []
    both = survey({"train": rows, "val": rows.select([0])}, "image", 10**6, 0, progress=False)
    assert both.copies == [("train: row 0", "val: row 0")]
