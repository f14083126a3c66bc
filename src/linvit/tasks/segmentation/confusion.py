"""The scores of semantic segmentation, all from one confusion matrix of the whole set.

The mean of the scores of single images is another number. torchmetrics' `MeanIoU` is one, so it is not used.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassConfusionMatrix

from linvit.ignore_index import IGNORE_INDEX


class PixelConfusion(MulticlassConfusionMatrix):
    """Confusion matrix (K, K) of pixels: rows are labels, columns are predictions; ignored pixels are left out.

    Args:
        num_classes: Classes K.
    """

    def __init__(self, num_classes: int, **options: Any) -> None:
        super().__init__(num_classes, ignore_index=IGNORE_INDEX, validate_args=False, **options)


def class_scores(matrix: Tensor) -> dict[str, Tensor]:
    """IoU, accuracy (recall) and F1 of each class (K,), float64; NaN for a class without a pixel to judge by.

    A class that is predicted somewhere and labelled nowhere has an IoU of 0 and no accuracy.
    """
    matrix = matrix.double()
    both, labelled, predicted = matrix.diagonal(), matrix.sum(1), matrix.sum(0)
    return {
        "IoU": both / (labelled + predicted - both),
        "Acc": both / labelled,
        "F1": 2 * both / (labelled + predicted),
    }


def mean_scores(matrix: Tensor, exclude_from_mean: Sequence[int] = ()) -> dict[str, Tensor]:
    """Scores of a confusion matrix, each a scalar.

    `mIoU`, `mAcc` and `mF1` are means over the classes that have one; `aAcc` is the fraction of the labelled pixels
    that are right (overall accuracy, OA), and `kappa` is Cohen's: aAcc beyond that of independent labels and
    predictions with the same frequencies.

    Args:
        matrix: (K, K), rows are labels.
        exclude_from_mean: Classes that the means leave out, such as the clutter of the ISPRS sets; `aAcc` and `kappa`
            do not.
    """
    kept = torch.ones(len(matrix), dtype=torch.bool, device=matrix.device)
    kept[list(exclude_from_mean)] = False
    means = {f"m{name}": values[kept].nanmean() for name, values in class_scores(matrix).items()}
    matrix = matrix.double() / matrix.sum()
    right, by_chance = matrix.trace(), matrix.sum(0) @ matrix.sum(1)
    return {**means, "aAcc": right, "kappa": (right - by_chance) / (1 - by_chance)}


class ConfusionScore(Metric):
    """One score of a confusion matrix that several scores share; whoever updates the matrix calls `update` of each.

    Args:
        confusion: The matrix.
        name: One of `mean_scores`.
        exclude_from_mean: See `mean_scores`.
    """

    full_state_update = False

    def __init__(self, confusion: PixelConfusion, name: str, exclude_from_mean: Sequence[int] = ()) -> None:
        super().__init__()
        self.confusion = confusion
        self.name = name
        self.exclude_from_mean = exclude_from_mean

    def update(self) -> None:
        """Says that the matrix has been updated."""

    def compute(self) -> Tensor:
        """The score, a scalar."""
        return mean_scores(self.confusion.compute(), self.exclude_from_mean)[self.name].float()

    def reset(self) -> None:
        """Empties the matrix, too."""
        super().reset()
        self.confusion.reset()
