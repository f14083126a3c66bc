"""Palettes, overlays and legends."""

import numpy as np

from linvit.callbacks.dense import LINE, OPACITY, legend, overlay, palette


def test_colours_differ_and_end_with_pascal_voc_s():
    colours = palette(256)
    assert len(np.unique(colours, axis=0)) == 256
    assert colours[15:17].tolist() == [[192, 128, 128], [0, 64, 0]]
    assert (palette(20) == colours[:20]).all()


def test_an_overlay_mixes_known_classes_and_leaves_the_others():
    picture = np.full((1, 3, 3), 100, dtype=np.uint8)
    colours = palette(2)
    mixed = overlay(picture, np.array([[0, 1, 255]]), colours)
    for pixel, colour in zip(mixed[0, :2], colours, strict=True):
        assert (pixel == ((1 - OPACITY) * 100 + OPACITY * colour).round()).all()
    assert (mixed[0, 2] == 100).all()


def test_a_legend_has_a_swatch_for_each_class_in_as_many_columns_as_fit():
    names = [f"class {i}" for i in range(30)]
    narrow, wide = (np.asarray(legend(palette(30), names, width)) for width in (100, 800))
    assert narrow.shape[1] == 100
    assert narrow.shape[0] > 29 * LINE > wide.shape[0]
    for picture in (narrow, wide):
        for colour in palette(30):
            assert (picture == colour).all(-1).sum() > 50
