"""Semantic segmentation: one class per pixel."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from linvit.callbacks.common import class_names
from linvit.callbacks.dense import SegmentationPictures, legend, overlay, palette, write_mask
from linvit.callbacks.report import Findings, Report, confusion_picture, write_picture
from linvit.errors import UserError, check_choice, check_number
from linvit.heads.layers import resize
from linvit.heads.segmentation.inference import bands, starts
from linvit.heads.segmentation.segmentor import create_segmentor
from linvit.ignore_index import IGNORE_INDEX
from linvit.image_size import image_size
from linvit.io.plain_text import printable
from linvit.tasks.base import Description, Task
from linvit.tasks.execution import SharedScore
from linvit.tasks.published import PublishedScores, published_miou
from linvit.tasks.results import Result
from linvit.tasks.segmentation.scores import (
    PixelConfusion,
    PixelMean,
    class_scores,
    dice_loss,
    pixel_cross_entropy,
)

SCORES = ("mIoU", "mAcc", "aAcc", "mF1", "kappa")
MOST_NAMED = 3  # classes in the description of a mask
PIXELS = 2**21  # of images that are evaluated at once, such as 8 of 512 x 512


@dataclass(kw_only=True)
class SegmentationResult(Result):
    """The class of every pixel of an image, at its original size.

    Attributes:
        mask: Numbers of the classes (H, W), int32.
    """

    mask: np.ndarray

    @property
    def labels(self) -> list[str]:
        """Names of the classes that are there."""
        return [self.class_names[index] for index in np.unique(self.mask)]

    def plot(self) -> Image.Image:
        """Returns the image under the colours of the classes."""
        picture = self.image.resize(self.mask.shape[::-1])  # without a part that the network did not see
        return Image.fromarray(overlay(np.asarray(picture), self.mask, self.palette))

    def save(self, path: str | Path) -> Path:
        """Writes the mask as `path`, whose ending is .png or, of a GeoTIFF, .tif; its values are the classes."""
        return write_mask(Path(str(path).removesuffix(".png")), self.mask, self.palette, self.name)

    def write(self, target: Path, number: int) -> None:
        """Writes `NAME.png`, of a GeoTIFF `NAME.tif` with its georeference, and `NAME_overlay.jpg`."""
        super().write(target, number)
        write_picture(target.with_name(f"{target.name}_overlay.jpg"), self.plot(), durable=False, quality=92)

    @classmethod
    def write_set(
        cls, rows: Sequence[Any], path: Path, class_names: Sequence[str], ids: Sequence[int] | None = None
    ) -> Path:
        """Writes `legend.png`, with the names of the colours."""
        write_picture(path / "legend.png", legend(palette(len(class_names)), class_names, 600))
        return path


class SegmentationTask(Task):
    """Cross entropy of pixels; `val/score` is the mean IoU of the classes, over the whole set, at the labels' size.

    Also logged are the mean accuracy of the classes (`mAcc`), the accuracy of all pixels (`aAcc`, overall accuracy),
    the mean F1 (`mF1`) and Cohen's kappa. Pixels labelled 255 count nowhere. Small images of one size are evaluated at
    once, others one by one, and logits of all classes at full size exist for a few rows at a time.

    Args:
        head: Name, or `{name: ..., option: value}`. See `linvit list heads`.
        loss_average: Cross entropy over "all" pixels, ignored ones included, as in the papers' programs, or over
            "valid" ones.
        label_smoothing: Fraction of the target spread over all classes while training.
        dice_weight: Weight of a Dice loss beside the cross entropy.
        auxiliary_weight: Weight of the loss of a head's auxiliary output, which exists in training only.
        window: Side, or [H, W], of overlapping windows by which images are evaluated; null takes whole images.
        stride: Step between windows; null is two thirds of the window.
        scales: Factors on the size of the images in evaluation; with several, their probabilities are averaged.
        mirror: Average also over mirrored images in evaluation.
        score: What `val/score` is: mIoU, mAcc, aAcc, mF1 or kappa.
        exclude_from_mean: Names of classes that the means leave out, such as the clutter of the ISPRS sets.
        **task: Arguments of `Task`: backbone, attention, optimisation.

    Example:
        $ linvit fit --config segmentation_quickstart --model.head=upernet --model.attention=focused
    """

    advanced_options = Task.advanced_options | {"loss_average", "label_smoothing", "dice_weight", "exclude_from_mean"}

    evaluation_options = ("window", "stride", "scales", "mirror")

    def __init__(
        self,
        head: str | dict[str, Any] = "upernet",
        loss_average: Literal["all", "valid"] = "all",
        label_smoothing: float = 0.0,
        dice_weight: float = 0.0,
        auxiliary_weight: float = 0.4,
        window: int | Sequence[int] | None = None,
        stride: int | Sequence[int] | None = None,
        scales: Sequence[float] = (1.0,),
        mirror: bool = False,
        score: str = "mIoU",
        exclude_from_mean: Sequence[str] = (),
        **task: Any,
    ) -> None:
        check_choice("score", score, SCORES)
        check_number("label_smoothing", label_smoothing, at_least=0, below=1)
        check_number("dice_weight", dice_weight, at_least=0)
        check_number("auxiliary_weight", auxiliary_weight, at_least=0)
        if not scales:
            raise UserError("scales must list at least one factor, such as [1.0]")
        for scale in scales:
            check_number("scales", scale, above=0)
        if stride is not None and window is None:
            raise UserError(f"stride is {stride}, but there are no windows; set --model.window, or leave stride out")
        super().__init__(**task)
        self.score_metric = score
        self.window = None if window is None else image_size(window)
        self.stride = None if stride is None else image_size(stride)
        for side, step in zip(self.window or (), self.stride or (), strict=False):
            starts(side, side, step)  # raises if windows would leave pixels out

    def configure_network(self) -> nn.Module:
        """Returns the backbone with the head: images (B, 3, H, W) to logits (B, K, H, W)."""
        names = ("backbone", "head", "num_classes", "attention", "img_size", "in_chans", "drop_path_rate")
        return create_segmentor(**{name: self.hparams[name] for name in names})

    def configure_metrics(self) -> Mapping[str, Metric]:
        """Cross entropy of the labelled pixels, and the scores of one confusion matrix."""
        names = self.hparams["class_names"] or []
        for name in self.hparams["exclude_from_mean"]:
            check_choice("an entry of exclude_from_mean", name, list(names))
        excluded = [names.index(name) for name in self.hparams["exclude_from_mean"]]
        confusion = PixelConfusion(self.hparams["num_classes"], excluded)
        return {"loss": PixelMean(), **{name: SharedScore(confusion, name) for name in SCORES}}

    def training_loss(self, batch: dict[str, Any]) -> Tensor:
        """Cross entropy and Dice loss of the logits, and those of auxiliary logits with their weight."""
        label = batch["mask"].long()
        logits, others = self.network(batch["image"], auxiliary=True, full_size=False)
        loss = self._loss(logits, label)
        for auxiliary in others:
            loss = loss + self.hparams["auxiliary_weight"] * self._loss(auxiliary, label)
        return loss

    def score_batch(self, network: nn.Module, batch: dict[str, Any], metrics: Mapping[str, Any]) -> list[Tensor]:
        """Updates loss and scores; returns the classes (H, W), uint8 or int64, of each image at its labels' size."""
        found: list[Tensor] = []
        confusion = metrics["mIoU"].state
        sizes = [mask.shape for mask in batch["mask"]]
        for group in of_one_size(batch["image"], sizes):
            images, label = (torch.stack([batch[name][i] for i in group]) for name in ("image", "mask"))
            label, top, predicted = label.long(), 0, []
            for scores in self._bands(network, images, label.shape[1:]):
                rows = label[:, top : top + scores.shape[2]]
                top += scores.shape[2]
                losses = F.nll_loss(scores.clamp(min=1e-30).log(), rows, ignore_index=IGNORE_INDEX, reduction="none")
                metrics["loss"].update(losses, (rows != IGNORE_INDEX).to(losses.dtype))
                predicted.append(scores.argmax(1))
                confusion.update(predicted[-1], rows)
            found += torch.cat(predicted, 1)
        for name in SCORES:
            metrics[name].update()
        return found

    def predict_batch(self, network: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Ids (B), and the classes (H, W) of each image at its original size."""
        sizes = batch["size"] if "size" in batch else [image.shape[1:] for image in batch["image"]]
        classes: list[Tensor] = []
        for group in of_one_size(batch["image"], sizes):
            images = torch.stack([batch["image"][i] for i in group])
            classes += torch.cat([scores.argmax(1) for scores in self._bands(network, images, sizes[group[0]])], 1)
        return {"id": batch["id"], "classes": classes}

    def image_results(self, predicted: dict[str, Any]) -> list[SegmentationResult]:
        """Returns the mask of each image."""
        return [SegmentationResult(mask=mask.to(torch.int32).cpu().numpy()) for mask in predicted["classes"]]

    def describe(self, batch: dict[str, Any], predicted: Mapping[str, Any]) -> Description:
        """Returns the largest classes of the predicted mask and of the true one, if there is one, and both masks."""
        given = {"true mask": batch["mask"]} if "mask" in batch else {}
        masks = {title: mask[0].cpu().numpy() for title, mask in (given | {"prediction": predicted["classes"]}).items()}
        words = {title: class_shares(mask, class_names(self)) for title, mask in masks.items()}
        return Description(words["prediction"], words.get("true mask", ""), masks)

    def run_callbacks(self) -> list[Callback]:
        """Adds a table of the classes, a confusion matrix and pictures."""
        return [*super().run_callbacks(), Report(self.report_folder), SegmentationPictures()]

    def published(self) -> PublishedScores | None:
        """Returns the published mean IoU on ADE20K, for evaluation at one scale."""
        settings = self.hparams
        if self.window is not None or settings["mirror"] or [*settings["scales"]] != [1]:
            return None
        return published_miou(settings)

    def class_findings(self, stage: str) -> Findings:
        """Returns pixels and scores of each class of the set that was just evaluated, and the confusion matrix."""
        metrics: Any = self.metrics[f"{stage}/" if self.average is None else f"{stage}/ema_"]
        matrix: Tensor = metrics["mIoU"].state.compute()
        scores, counts = (
            {name: values.cpu().numpy() for name, values in class_scores(matrix).items()},
            matrix.cpu().numpy(),
        )
        label, predicted = np.nonzero(counts)
        picture = partial(confusion_picture, label, predicted, class_names(self), counts[label, predicted])
        return Findings("pixels", counts.sum(1), scores, "confusion", picture)

    def _loss(self, logits: Tensor, label: Tensor) -> Tensor:
        average, smoothing = self.hparams["loss_average"], self.hparams["label_smoothing"]
        logits = resize(logits.float(), label.shape[-2:])  # once for both losses
        loss = pixel_cross_entropy(logits, label, average, smoothing)
        dice = self.hparams["dice_weight"]
        return loss + dice * dice_loss(logits, label) if dice else loss

    def _bands(self, network: nn.Module, images: Tensor, size: Sequence[int]) -> Iterator[Tensor]:
        """Bands of probabilities (B, K, rows, W) of images (B, 3, H, W), at another size."""
        views = []
        for scale in self.hparams["scales"]:
            side = [int(length * scale + 0.5) for length in images.shape[2:]]
            view = images
            if scale != 1:
                view = F.interpolate(view, side, mode="bilinear", align_corners=False)
            views += [(view, False), (view.flip(-1), True)][: 1 + self.hparams["mirror"]]
        return bands(partial(network, full_size=False), views, [*map(int, size)], self.window, self.stride)


def of_one_size(images: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yields neighbouring images of a batch to evaluate at once: images and results have one size, and few pixels."""
    kinds = [(image.shape, tuple(map(int, size))) for image, size in zip(images, sizes, strict=True)]
    for (shape, _), same in groupby(range(len(kinds)), kinds.__getitem__):
        numbers, most = list(same), max(PIXELS // math.prod(shape[1:]), 1)
        yield from (numbers[first : first + most] for first in range(0, len(numbers), most))


def class_shares(mask: np.ndarray, names: Sequence[str]) -> str:
    """Returns the largest classes of a mask (H, W) with their shares of its pixels: "sky: 60%, road: 31%"."""
    numbers, counts = np.unique(mask, return_counts=True)
    most = sorted(zip(counts.tolist(), numbers.tolist(), strict=True), reverse=True)
    named = [(names[number], count) for count, number in most if number < len(names)][:MOST_NAMED]
    return ", ".join(f"{printable(name, lines=False)}: {count / mask.size:.0%}" for name, count in named)
