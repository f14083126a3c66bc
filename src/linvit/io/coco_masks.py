"""Masks in COCO's run-length encoding (RLE), by faster-coco-eval, which gives the results of pycocotools.

An RLE is a mapping `{"size": [H, W], "counts": ...}`. linvit uses counts as text, which JSON and arrow can store.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from linvit.errors import UserError

Rle = dict[str, Any]
MAX_OUTLINE = 100  # maximum total length of the polygons of a mask, in units of height and width of its image


def encode(masks: Any) -> list[Rle]:
    """Returns the RLEs of masks (n, H, W) of numbers or bools; nonzero pixels belong to the object."""
    masks = np.asarray(masks).astype(bool).astype(np.uint8)
    if not len(masks):
        return []
    return [_text(rle) for rle in _library().encode(masks.transpose(1, 2, 0))]  # (H, W, n)


def decode(rles: Sequence[Rle]) -> np.ndarray:
    """Returns masks (n, H, W) of 0 and 1, uint8, of RLEs of one size; (0, 0, 0) without any."""
    if not rles:
        return np.zeros((0, 0, 0), np.uint8)
    library = _library()
    try:
        return np.ascontiguousarray(library.decode(list(rles)).transpose(2, 0, 1))  # (H, W, n) -> (n, H, W)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"not a run-length encoded mask: {str(error).rstrip('.')}") from error


def area(rles: Sequence[Rle]) -> np.ndarray:
    """Returns the number of pixels of each mask, int64 (n,)."""
    return np.asarray(_library().area(list(rles)) if rles else [], np.int64)


def from_polygons(polygons: Sequence[Sequence[float]], size: tuple[int, int]) -> Rle:
    """Returns the RLE of all pixels within any of the polygons [x1, y1, x2, y2, ...], by COCO's rule of borders.

    Raises a `UserError` if a polygon has fewer than three corners, an odd number of coordinates or one far outside the
    image (H, W), or if all are too long together: the library draws whole lines, which cost time and memory by length.
    """
    height, width = size
    outline = 0.0
    for polygon in polygons:
        if len(polygon) < 6 or len(polygon) % 2:
            raise UserError(f"a polygon is [x1, y1, x2, y2, x3, y3, ...]; got {len(polygon)} coordinates")
        corners = np.asarray(polygon, float).reshape(-1, 2)
        if not np.abs(corners).max() <= 10 * max(height, width):  # also true for NaN
            raise UserError(f"a polygon has corners far outside of its image of {width} x {height} pixels")
        outline += np.abs(corners - np.roll(corners, 2)).max(1).sum()
    if outline > MAX_OUTLINE * (height + width):
        raise UserError(
            f"the outlines of its {len(polygons):,} polygons have {outline:,.0f} pixels, more than {MAX_OUTLINE} times "
            f"the height and width of the image; store it as a run-length encoding"
        )
    if not polygons:
        raise UserError("a mask needs at least one polygon")
    library = _library()
    return _text(library.merge(library.frPyObjects([list(map(float, polygon)) for polygon in polygons], height, width)))


def compress(counts: Sequence[int], size: tuple[int, int]) -> Rle:
    """Returns the RLE of uncompressed counts: pixels outside, inside, outside, ... of the object, column by column."""
    if min(counts, default=-1) < 0 or sum(counts) != size[0] * size[1]:
        raise UserError(
            f"counts of a run-length encoded mask must be 0 or more and add up to the pixels of the image, "
            f"{size[0]} x {size[1]}; got {len(counts)} numbers with the sum {sum(counts)}"
        )
    return _text(_library().frPyObjects({"size": list(size), "counts": list(counts)}, *size))


def _text(rle: Rle) -> Rle:
    return {"size": [int(side) for side in rle["size"]], "counts": rle["counts"].decode("ascii")}


def _library() -> ModuleType:
    try:
        from faster_coco_eval.core import mask
    except ImportError as error:
        raise UserError("COCO's masks need the package 'faster-coco-eval': pip install 'linvit[detection]'") from error
    return mask  # type: ignore[no-any-return]
