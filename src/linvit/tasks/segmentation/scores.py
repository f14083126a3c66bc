"""Losses and scores of semantic segmentation: labels are (B, H, W), and those of `IGNORE_INDEX` count for nothing."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassConfusionMatrix

from linvit.heads.layers import resize
from linvit.ignore_index import IGNORE_INDEX


def pixel_cross_entropy(
    logits: Tensor, label: Tensor, average: Literal["all", "valid"] = "all", label_smoothing: float = 0.0
) -> Tensor:
    """Returns mean cross entropy of logits (B, K, h, w), any size, and labels (B, H, W), int64; 0 if all ignored.

    Logits are resized to the labels first, by bilinear interpolation. `average` "all" divides by the number of all
    pixels, ignored ones included, as the papers' programs do (mmsegmentation 0.x); "valid" by that of labelled ones.
    """
    logits = resize(logits.float(), label.shape[-2:])
    losses = F.cross_entropy(
        logits, label, ignore_index=IGNORE_INDEX, reduction="none", label_smoothing=label_smoothing
    )
    return losses.mean() if average == "all" else losses.sum() / (label != IGNORE_INDEX).sum().clamp(min=1)


def dice_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Returns the mean over the classes in the labels (B, H, W) of `1 - 2 sum(p y) / (sum(p) + sum(y))`; else 0.

    The sums are over all labelled pixels of the batch, p is the softmax, and y is 1 where the label is the class
    (Milletari et al. 2016, "V-Net", Sec. 3). Logits are resized to the labels first.
    """
    logits = resize(logits.float(), label.shape[-2:])
    classes = torch.arange(logits.shape[1], device=label.device).view(-1, 1, 1)
    valid = (label != IGNORE_INDEX)[:, None]
    target = ((label[:, None] == classes) & valid).to(logits)  # (B, K, H, W)
    # One product instead of sums over pixels: a third of the time on a CPU, in float32 also in mixed precision.
    with torch.autocast(logits.device.type, enabled=False):
        sums = (logits.softmax(1).flatten(2) @ target.flatten(2).mT).sum(0)  # (K, K), of probabilities by label
    labelled = target.sum((0, 2, 3))
    present = labelled > 0
    dice = 2 * sums.diagonal() / (sums.sum(1) + labelled).where(present, 1)
    return (1 - dice).where(present, 0).sum() / present.sum().clamp(min=1)


class PixelMean(MeanMetric):
    """Weighted mean of values; torchmetrics' own ignores the weights if it does not check for NaN."""

    def __init__(self) -> None:
        super().__init__(nan_strategy="disable")

    def update(self, value: Tensor, weight: Tensor) -> None:  # type: ignore[override]
        """Adds values (...) with weights (...)."""
        self.mean_value += (value * weight).sum()
        self.weight += weight.sum()


class PixelConfusion(MulticlassConfusionMatrix):
    """Confusion matrix (K, K) of pixels: rows are labels, columns are predictions; ignored pixels are left out."""

    def __init__(self, num_classes: int, exclude_from_mean: Sequence[int] = ()) -> None:
        super().__init__(num_classes, ignore_index=IGNORE_INDEX, validate_args=False)
        self.exclude_from_mean = exclude_from_mean

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Counts predicted classes (...) by their labels (...) in half of torchmetrics' time, without synchronising."""
        valid = target != IGNORE_INDEX
        pairs = target.where(valid, 0) * self.num_classes + preds
        counts = torch.zeros(self.num_classes**2, dtype=torch.long, device=preds.device)
        self.confmat += counts.scatter_add_(0, pairs.flatten(), valid.flatten().long()).view_as(self.confmat)

    def figures(self) -> dict[str, Tensor]:
        """Returns the scores by name; see `mean_scores`."""
        return mean_scores(self.compute(), self.exclude_from_mean)


def class_scores(matrix: Tensor) -> dict[str, Tensor]:
    """Returns IoU, accuracy (recall) and F1 per class (K,), float64; NaN for a class without pixels to judge."""
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
    """
    kept = torch.ones(len(matrix), dtype=torch.bool, device=matrix.device)
    kept[list(exclude_from_mean)] = False
    means = {f"m{name}": values[kept].nanmean() for name, values in class_scores(matrix).items()}
    matrix = matrix.double() / matrix.sum()
    right, by_chance = matrix.trace(), matrix.sum(0) @ matrix.sum(1)
    return {**means, "aAcc": right, "kappa": (right - by_chance) / (1 - by_chance)}
