"""COCO's run-length encoding, against pycocotools."""

import json
import sys

import numpy as np
import pytest
import torch
from pycocotools import mask as reference

from linvit import UserError
from linvit.io import coco_masks

MASKS = np.random.default_rng(0).random((3, 7, 5)) < 0.4
POLYGON = [1.2, 1, 4.5, 1.5, 4, 6.7]


def test_masks_survive():
    rles = coco_masks.encode(torch.from_numpy(MASKS))
    assert (coco_masks.decode(json.loads(json.dumps(rles))) == MASKS).all()
    assert coco_masks.area(rles).tolist() == MASKS.sum((1, 2)).tolist()
    assert [rle["counts"] for rle in rles] == [
        reference.encode(np.asfortranarray(mask, np.uint8))["counts"].decode() for mask in MASKS
    ]
    assert coco_masks.encode(255 * MASKS.astype(int)) == rles


@pytest.mark.parametrize("polygons", [[POLYGON], [POLYGON, [-3, 0, 2, 0, 2, 9]], [[1, 1, 1, 1, 1, 1]]])
def test_polygons_as_coco_draws_them(polygons):
    expected = reference.merge(reference.frPyObjects(polygons, 7, 5))
    assert coco_masks.from_polygons(polygons, (7, 5)) == {"size": [7, 5], "counts": expected["counts"].decode()}


def test_uncompressed_counts():
    (compressed,) = coco_masks.encode([np.arange(35).reshape(5, 7).T // 4 == 1])
    assert coco_masks.compress([4, 4, 27], (7, 5)) == compressed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: coco_masks.from_polygons([[1, 1, 4]], (7, 5)), "got 3 coordinates"),
        (lambda: coco_masks.from_polygons([], (7, 5)), "at least one polygon"),
        (lambda: coco_masks.from_polygons([[0, 0, 1e9, 0, 1e9, 1e9]], (7, 5)), "far outside of its image of 5 x 7"),
        (lambda: coco_masks.from_polygons([[0, 0, float("nan"), 0, 1, 1]], (7, 5)), "far outside"),
        (
            lambda: coco_masks.from_polygons([[0, 0, 5, 0, 5, 7]] * 100, (7, 5)),
            "its 100 polygons have 1,900",
        ),
        (lambda: coco_masks.compress([4, 4], (7, 5)), "add up to the pixels of the image, 7 x 5"),
        (lambda: coco_masks.compress([4, -4, 35], (7, 5)), "0 or more"),
        (lambda: coco_masks.decode([{"size": [7000, 5], "counts": "9250<"}]), "expected 35000"),
        (lambda: coco_masks.decode([{"size": [7, 5], "counts": "abc"}]), "malformed"),
    ],
)
def test_what_is_no_mask_is_refused(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "faster_coco_eval.core", None)
    with pytest.raises(UserError, match=r"pip install 'linvit\[detection\]'"):
        coco_masks.encode(MASKS)
