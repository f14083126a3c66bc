"""Image classification: one class per image."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from linvit.backbones.images import forward_images
from linvit.callbacks.common import class_names
from linvit.callbacks.report import ClassReport, write_table
from linvit.errors import UserError, check_number
from linvit.io.files import write_text
from linvit.io.plain_text import printable
from linvit.tasks.base import Description, Task
from linvit.tasks.model_ema import ModelEma
from linvit.tasks.published import PublishedScores, published_top1
from linvit.tasks.results import Result

LINE = 14  # pixels of text below a picture


@dataclass(kw_only=True)
class ClassificationResult(Result):
    """The likeliest classes of an image, the surest first.

    Attributes:
        indices: Their numbers.
        scores: Their probabilities.
    """

    indices: list[int]
    scores: list[float]

    @property
    def labels(self) -> list[str]:
        """Their names."""
        return [self.class_names[index] for index in self.indices]

    def plot(self) -> Image.Image:
        """Returns the image with names and probabilities below it."""
        lines = [f"{score:.3f}  {label}" for label, score in zip(self.labels, self.scores, strict=True)]
        picture, font = self.image, ImageFont.load_default(12)
        width = max(picture.width, 160, *(int(font.getlength(line)) + 8 for line in lines))  # small ones are enlarged
        height = round(picture.height * width / picture.width)
        page = Image.new("RGB", (width, height + LINE * len(lines) + 6), "white")
        page.paste(picture.resize((width, height)))
        for i, line in enumerate(lines):
            ImageDraw.Draw(page).text((4, height + 2 + LINE * i), line, "black", font)
        return page

    def save(self, path: str | Path) -> Path:
        """Writes `path` as JSON: `labels` and `scores`."""
        write_text(Path(path), json.dumps({"labels": self.labels, "scores": self.scores}))
        return Path(path)

    def write(self, target: Path, number: int) -> tuple[str, str, str]:
        """Returns the row of the table."""
        return self.name, self.labels[0], f"{self.scores[0]:.6f}"

    @classmethod
    def write_set(
        cls, rows: Sequence[Any], path: Path, class_names: Sequence[str], ids: Sequence[int] | None = None
    ) -> Path:
        """Writes `predictions_SOURCE.csv` with a row for each image."""
        path = path if path.suffix == ".csv" else Path(f"{path}.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(path, [("id", "class", "probability"), *rows])
        return path


class ClassificationTask(Task):
    """Cross entropy, top-1 and top-5 accuracy; `val/score` is top-1.

    Args:
        label_smoothing: Fraction of the target spread over all classes while training.
        mixup_alpha: Beta(alpha, alpha) of mixup; 0 is off.
        cutmix_alpha: Beta(alpha, alpha) of CutMix; 0 is off. With both, each batch takes one at random.
        mesa: Weight of the cross entropy with the probabilities that the moving average predicts for the same images,
            from a quarter of the training on; 0 is off. It needs `ema_decay`. Paper: Du et al. 2022, "Sharpness-Aware
            Training for Free"; as MLLA, ViT^3 and VSSD are trained.
        **task: Arguments of `Task`: backbone, attention, optimisation.

    Example:
        $ linvit fit --config quickstart --model.backbone=deit_nano --model.attention=linear
    """

    score_metric = "top1"
    advanced_options = Task.advanced_options | {"mesa"}

    def __init__(
        self,
        label_smoothing: float = 0.1,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        mesa: float = 0.0,
        **task: Any,
    ) -> None:
        super().__init__(**task)
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing must be in [0, 1); got {label_smoothing}")
        check_number("mesa", mesa, at_least=0)
        if mesa and self.ema is None:
            raise UserError(
                f"mesa={mesa} compares with the moving average, and there is none: set --model.ema_decay=0.9999"
            )
        self.label_smoothing, self.mesa = label_smoothing, mesa
        self.mixup = Mixup(mixup_alpha, cutmix_alpha)

    def configure_metrics(self) -> Mapping[str, Metric]:
        """Returns plain cross entropy, top-1, and top-5 with more than five classes."""
        classes = self.hparams["num_classes"]
        tops = [top for top in (1, 5) if top < classes or top == 1]
        return {
            # Not sync_dist: Lightning divides by the rounded mean of the devices' images. NaN is seen without looking.
            "loss": MeanMetric(nan_strategy="disable"),
            **{f"top{top}": MulticlassAccuracy(classes, top_k=top, average="micro") for top in tops},
        }

    def forward(self, images: Tensor | Sequence[Tensor]) -> Tensor:
        """Maps images (B, C, H, W), or a list of images (C, H, W) of any sizes, to logits; see `Task.forward`."""
        return forward_images(self.network if self.training else self.predicting, images)

    def training_loss(self, batch: dict[str, Any]) -> Tensor:
        """Cross entropy against smoothed, possibly mixed targets, and with `mesa` against the moving average's."""
        image, target = batch["image"], batch["label"]
        if self.mixup.mixup_alpha or self.mixup.cutmix_alpha:
            if "seed" not in batch:
                raise UserError(
                    "mixup and CutMix are drawn from batch['seed'], an int of each batch, and this data has none. Add "
                    "it, or set --model.mixup_alpha=0 --model.cutmix_alpha=0"
                )
            image, target = self.mixup(image, target, self.hparams["num_classes"], batch["seed"])
        if "after_mixing" in batch:  # random erasing, in the recipes that mix first
            image = batch["after_mixing"](image)
        logits = self(image)
        loss = F.cross_entropy(logits, target, label_smoothing=self.label_smoothing)
        if self.mesa and self.ema is not None and 4 * self.global_step >= self.trainer.estimated_stepping_batches:
            with torch.no_grad():
                averaged = forward_images(self.ema.eval().network, image).softmax(
                    -1
                )  # a new run begins in training mode
            loss = loss + self.mesa * F.cross_entropy(logits, averaged)
        # Batches by tokens hold different numbers of images, and all images count equally.
        return loss * batch["loss_weight"] if "loss_weight" in batch else loss

    def score_batch(self, network: nn.Module, batch: dict[str, Any], metrics: Mapping[str, Any]) -> Tensor:
        """Updates loss and accuracies; returns the predicted classes (B,)."""
        logits, label = scored_logits(network, batch), batch["label"]  # (B, K), (B,)
        metrics["loss"].update(F.cross_entropy(logits, label, reduction="none"))
        for name, metric in metrics.items():
            if name != "loss":
                metric.update(logits, label)
        return logits.argmax(-1)

    def predict_batch(self, network: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Ids (B), predicted class indices (B,), their probabilities (B,), and those of all classes (B, K)."""
        probabilities = scored_logits(network, batch).softmax(-1)
        probability, index = probabilities.max(-1)
        return {"id": batch["id"], "class": index, "probability": probability, "probabilities": probabilities}

    def image_results(self, predicted: dict[str, Any], top_k: int = 5) -> list[ClassificationResult]:
        """Returns the `top_k` classes of each image, the surest first."""
        check_number("top_k", top_k, at_least=1, whole=True)
        ordered = predicted["probabilities"].cpu().sort(dim=-1, descending=True, stable=True)  # of equals the first
        scores, indices = (each[:, :top_k].tolist() for each in ordered)
        pairs = zip(indices, scores, strict=True)
        return [ClassificationResult(indices=own, scores=probabilities) for own, probabilities in pairs]

    def describe(self, batch: dict[str, Any], predicted: Mapping[str, Any]) -> Description:
        """Returns the predicted class with its probability, and the true one if there is a label."""
        names = [printable(name, lines=False) for name in class_names(self)]
        found = f"{names[int(predicted['class'][0])]}, {float(predicted['probability'][0]):.1%}"
        return Description(found, names[int(batch["label"][0])] if "label" in batch else "")

    def run_callbacks(self) -> list[Callback]:
        """Adds a table of the classes and a confusion matrix."""
        return [*super().run_callbacks(), ClassReport(self.report_folder)]

    def published(self) -> PublishedScores | None:
        """Returns the published top-1 accuracy on ImageNet-1K."""
        return published_top1(self.hparams)


def scored_logits(network: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Returns logits (B, K) of a batch, minus infinity for classes that its data, of some `classes` (K'), lacks."""
    logits = forward_images(network.network if isinstance(network, ModelEma) else network, batch["image"])
    if "classes" not in batch:
        return logits
    classes = batch["classes"]
    return torch.full_like(logits, -torch.inf).index_copy(1, classes, logits[:, classes])


STREAM = 1  # joined to the seed, so that these numbers differ from those that the first sample was augmented with


class Mixup:
    """Mixes each image with its partner in the reversed batch: the first with the last, and so on."""

    def __init__(self, mixup_alpha: float, cutmix_alpha: float) -> None:
        if mixup_alpha < 0 or cutmix_alpha < 0:
            raise UserError(f"mixup_alpha and cutmix_alpha must be 0 (off) or more; got {mixup_alpha}, {cutmix_alpha}")
        self.mixup_alpha = mixup_alpha
        self.cutmix_alpha = cutmix_alpha

    def __call__(self, images: Tensor, labels: Tensor, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
        """Mixes images (B, 3, H, W), and labels (B,) to probabilities (B, K); the seed determines all draws."""
        rng = np.random.default_rng((seed, STREAM))
        target = F.one_hot(labels, num_classes).to(images.dtype)
        _, drawn = rng.random(2)  # the first was whether to mix at all, which the seeds' numbers keep
        use_cutmix = drawn < (0.5 if self.mixup_alpha else 1) and bool(self.cutmix_alpha)
        alpha = self.cutmix_alpha if use_cutmix else self.mixup_alpha
        lam = float(rng.beta(alpha, alpha))
        images, lam = cutmix(images, lam, rng) if use_cutmix else (mixup(images, lam), lam)
        return images, target.lerp(target.flip(0), 1 - lam)


def mixup(images: Tensor, lam: float) -> Tensor:
    """`lam` of each image plus `1 - lam` of its partner in the reversed batch; (B, 3, H, W)."""
    return images.lerp(images.flip(0), 1 - lam)


def cutmix(images: Tensor, lam: float, rng: np.random.Generator) -> tuple[Tensor, float]:
    """Pastes a box of the partner into each image, of about `1 - lam` of the area, clipped to the image.

    The box is that of timm 0.3.2 to 1.0.20, with which the papers' models were trained: a side of odd length loses its
    last pixel. Later versions of timm keep it. Returns the images (B, 3, H, W), and the fraction of the area that is
    each image's own.
    """
    height, width = images.shape[-2:]
    half_height, half_width = (int(side * (1 - lam) ** 0.5) // 2 for side in (height, width))
    y, x = rng.integers(height), rng.integers(width)  # centre of the box
    rows = slice(max(y - half_height, 0), y + half_height)
    columns = slice(max(x - half_width, 0), x + half_width)
    mixed = images.clone()
    mixed[..., rows, columns] = images.flip(0)[..., rows, columns]
    pasted = images[0, 0, rows, columns].numel()
    return mixed, 1 - pasted / (height * width)
