"""Objects over pictures, and curves of precision over recall."""

import numpy as np
from PIL import Image

from linvit.callbacks.dense import curves_picture, draw
from linvit.io import coco_masks
from linvit.tasks.detection.evaluation import Objects

COLOURS = np.array([[200, 0, 0], [0, 0, 200]], dtype=np.uint8)
WHITE = (255, 255, 255)


def objects(scores=None, masks=None):
    """Two objects of an image of 40 x 80 pixels."""
    boxes = np.array([[10, 20, 30, 38], [50, 20, 70, 38]], dtype=np.float32)
    counts = None if masks is None else [rle["counts"] for rle in coco_masks.encode(masks)]
    return Objects((40, 80), boxes, np.array([0, 1]), counts, scores)


def test_boxes_and_names_are_drawn_at_the_size_of_the_picture():
    picture = Image.new("RGB", (160, 80), WHITE)
    draw(picture, objects(), COLOURS, ["a", "b"])
    pixels = np.asarray(picture)
    assert (pixels[60, 20] == COLOURS[0]).all()
    assert (pixels[60, 100] == COLOURS[1]).all()
    assert (pixels[60, 40] == WHITE).all()
    assert (pixels[60, 80] == WHITE).all()
    assert (pixels[30, 21] == COLOURS[0]).all()  # the name's background, above the box


def test_what_is_below_the_threshold_is_left_out_and_masks_are_laid_over():
    masks = np.zeros((2, 40, 80), dtype=np.uint8)
    masks[0, 25:30, 15:20], masks[1, 25:30, 55:60] = 1, 1
    picture = Image.new("RGB", (80, 40), WHITE)
    draw(picture, objects(np.array([0.9, 0.2]), masks), COLOURS, ["a", "b"], threshold=0.5)
    pixels = np.asarray(picture)
    assert 200 < pixels[27, 17, 0] < 255
    assert 100 < pixels[27, 17, 1] < 200
    assert (pixels[:, 50:] == WHITE).all()


def test_curves_have_a_panel_per_kind_also_without_any_class():
    precision = np.full((10, 101, 3), 0.5)
    precision[..., 1] = -1
    assert curves_picture({"box": precision, "mask": np.full((10, 101, 3), -1.0)}).shape == (420, 1000, 3)
