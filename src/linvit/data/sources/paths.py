"""Pathfinder: dashed paths and two dots, and whether one path joins these. A sample is a function of its seed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from linvit.data.loading.sampler import generator

LENGTH, SHORT = 14, 4  # dashes of the two long paths, of whose ends two have a dot, and of the others
GAP = 1.0  # pixels between dashes
BEND, WOBBLE, SHARPEST = 0.35, 0.15, 0.7  # radians from dash to dash: of the whole path, of each, and the most of both
ALIKE = 1.0  # pixels by which the distance of the dots may differ between the labels
DRAWN = 128  # paths that are drawn at a time; the first one with room is taken


class Layout(NamedTuple):
    """Geometry of images of one side length, in pixels; lengths and numbers as in the Long Range Arena."""

    dash: float
    thickness: float
    dot: float  # radius
    others: int  # short paths
    contrast: float  # of the dashes; dots have 1


LAYOUTS = {32: Layout(2, 0.5, 1.5, 5, 0.75), 64: Layout(5, 1, 2.5, 4, 0.8)}


def sample(split: str, seed: int, side: int) -> dict[str, Any]:
    """Returns `image`, 8-bit (3, side, side), and `label`: 1 if the dots end one path, 0 if they end two paths."""
    rng, layout = generator(seed), LAYOUTS[side]
    label = int(rng.integers(2))
    marks = None
    while marks is None:
        paths: list[np.ndarray] = []
        while len(paths) < 2 and (found := draw(rng, side, layout, LENGTH, paths)) is not None:
            paths.append(found)
        marks = dots(paths, layout) if len(paths) == 2 else None
    for _ in range(layout.others):  # as far as there is room
        if (found := draw(rng, side, layout, SHORT, paths, marks[label])) is not None:
            paths.append(found)
    return {"image": torch.from_numpy(painted(side, layout, paths, marks[label])), "label": label}


def draw(
    rng: np.random.Generator,
    side: int,
    layout: Layout,
    count: int,
    others: Sequence[np.ndarray],
    marks: Sequence[complex] = (),
) -> np.ndarray | None:
    """Returns a path of dashes (count, 2), ends x + iy, that touches neither itself nor others; None without one."""
    turns = rng.uniform(-BEND, BEND, (DRAWN, 1)) + rng.normal(0, WOBBLE, (DRAWN, count))
    along = np.exp(1j * (rng.uniform(0, 2 * np.pi, (DRAWN, 1)) + turns.clip(-SHARPEST, SHARPEST).cumsum(1)))
    middle, room = ((layout.dash + GAP) * along).cumsum(1), side - 2 * (layout.dot + 1)
    parts = np.stack([middle.real, middle.imag])  # (2, DRAWN, count)
    low, high = parts.min(-1), parts.max(-1)
    x, y = layout.dot + 1 - low + rng.random((2, DRAWN)) * (room - (high - low))
    fits = (high - low < room).all(0)
    middle, along = (middle + (x + 1j * y)[:, None])[fits], layout.dash / 2 * along[fits]
    clear = (layout.dash + layout.thickness + GAP) ** 2  # no two dashes with middles so far apart touch
    pairs = np.triu_indices(count, 2)
    free = (squared(middle[:, pairs[0]] - middle[:, pairs[1]]) > clear).all(1)
    middle, along = middle[free], along[free]
    for taken, clear in (*((path.mean(1), clear) for path in others), (np.array(marks), beside(layout))):
        free = (squared(middle[:, :, None] - taken) > clear).all((1, 2))
        middle, along = middle[free], along[free]
    return np.stack([middle[0] - along[0], middle[0] + along[0]], 1) if len(middle) else None


def squared(distance: np.ndarray) -> np.ndarray:
    """Returns the squares of complex distances, without their roots."""
    square: np.ndarray = distance.real**2 + distance.imag**2
    return square


def beside(layout: Layout) -> float:
    """Returns the square of the distance at which a dash does not touch a dot."""
    return (layout.dot + layout.dash / 2 + layout.thickness + GAP) ** 2


def dots(paths: list[np.ndarray], layout: Layout) -> list[list[complex]] | None:
    """Returns possible dots for labels 0 (ends of two paths) and 1 (ends of one), equally far apart, or None."""
    ends = [
        [end for end in (path[0, 0], path[-1, 1]) if (squared(end - other.mean(1)) > beside(layout)).all()]
        for path, other in (paths, paths[::-1])
    ]
    choices = [[[a, b], same] for a in ends[0] for b in ends[1] for same in ends if len(same) == 2]
    unlike = [abs(abs(a - b) - abs(c - d)) for (a, b), (c, d) in choices]
    return choices[int(np.argmin(unlike))] if min(unlike, default=ALIKE) < ALIKE else None


def painted(side: int, layout: Layout, paths: list[np.ndarray], marks: list[complex]) -> np.ndarray:
    """Returns the image, 8-bit (3, side, side): how much of each pixel is ink, by its distance from dashes and dots."""
    dashes, grey = np.concatenate(paths), np.zeros((side, side))
    reach = np.arange(-int(layout.dash / 2 + 2), int(layout.dash / 2 + 3))
    for ends, half, ink in ((dashes, layout.thickness / 2, layout.contrast), (np.array(marks)[:, None], layout.dot, 1)):
        start, along = ends[:, :1], ends[:, -1:] - ends[:, :1]
        near = np.floor(ends.mean(1, keepdims=True).view(float)).astype(int)  # (N, 2), the pixels of the middles
        x, y = (
            part.reshape(len(ends), -1)
            for part in np.broadcast_arrays(near[:, :1, None] + reach, near[:, 1:, None] + reach[:, None])
        )
        away = x + 0.5 + 1j * (y + 0.5) - start
        share = ((away * along.conj()).real / np.maximum(squared(along), 1e-9)).clip(0, 1)
        cover = ink * (half + 0.5 - np.abs(away - share * along)).clip(0, 1)
        seen = (x >= 0) & (x < side) & (y >= 0) & (y < side)
        np.maximum.at(grey, (y[seen], x[seen]), cover[seen])
    return np.stack([np.rint(255 * grey).astype(np.uint8)] * 3)
