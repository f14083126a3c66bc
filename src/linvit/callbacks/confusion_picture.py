"""A confusion matrix as a picture: a row per label, a column per prediction, the darker the larger part of the row."""

from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torchmetrics.classification import MulticlassConfusionMatrix

MOST = 50  # classes in a picture
WITH_TEXT = 20  # classes up to which the fractions are written


def confusion_picture(
    labels: np.ndarray, predicted: np.ndarray, classes: int, names: Sequence[str] | None = None, most: int = MOST
) -> np.ndarray:
    """Draws the matrix of all classes, or of the most confused ones where there are more than fit: (H, W, 3), uint8.

    Colours are fractions of all images with a label. Most confused are the classes with the most wrong images, with
    that label or with that prediction.

    Args:
        labels: Classes of the images (n,).
        predicted: Their predicted classes (n,).
        classes: How many there are.
        names: Of the classes; None writes their indices.
        most: Classes in the picture.
    """
    wrong = labels != predicted
    errors = np.bincount(labels[wrong], minlength=classes) + np.bincount(predicted[wrong], minlength=classes)
    shown = _most(errors, most)
    place = np.full(classes, -1)
    place[shown] = np.arange(len(shown))
    row, column = place[labels], place[predicted]
    inside = (row >= 0) & (column >= 0)
    counts = np.zeros((len(shown), len(shown)), dtype=np.int64)
    np.add.at(counts, (row[inside], column[inside]), 1)
    return _draw(counts, np.bincount(labels, minlength=classes), shown, names)


def matrix_picture(matrix: np.ndarray, names: Sequence[str] | None = None, most: int = MOST) -> np.ndarray:
    """Draws a confusion matrix of pixels (K, K), whose rows are labels, as `confusion_picture` draws one of images."""
    shown = _most(matrix.sum(0) + matrix.sum(1) - 2 * matrix.diagonal(), most)
    return _draw(matrix[np.ix_(shown, shown)], matrix.sum(1), shown, names)


def _most(errors: np.ndarray, most: int) -> np.ndarray:
    """The classes with the most errors, in their order."""
    return np.sort(np.argsort(-errors, kind="stable")[:most])


def _draw(counts: np.ndarray, labelled: np.ndarray, shown: np.ndarray, names: Sequence[str] | None) -> np.ndarray:
    fractions = torch.from_numpy(counts / np.maximum(labelled[shown], 1)[:, None])
    few = len(shown) <= WITH_TEXT
    side = 3 + len(shown) * (0.6 if few else 0.2)  # inches
    figure = Figure(figsize=(side, side), dpi=100, layout="constrained")
    canvas, axes = FigureCanvasAgg(figure), figure.subplots()
    written = [str(c) if names is None else names[c][:18] for c in shown]
    MulticlassConfusionMatrix(max(len(shown), 2)).plot(fractions, axes, add_text=few, labels=written, cmap="Blues")
    axes.tick_params("x", rotation=90)
    if len(shown) < len(labelled):
        axes.set_title(f"the {len(shown)} most confused of {len(labelled)} classes")
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]
