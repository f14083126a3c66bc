"""A dense task: the class of each pixel."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from linvit.tasks import Task
from linvit.tasks.results import Result


class DenseNetwork(nn.Module):
    """A backbone, a 1x1 convolution, and bilinear upsampling: images (B, 3, H, W) to logits (B, K, H, W)."""

    def __init__(self, backbone, num_classes):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Conv2d(backbone.num_features, num_classes, 1)

    def forward(self, images):
        (feature,) = self.backbone.forward_intermediates(images, 1, norm=True, intermediates_only=True)
        return F.interpolate(self.head(feature), images.shape[-2:], mode="bilinear")


class InkWriter(Callback):
    """Writes the fraction of ink in each image."""

    def on_predict_batch_end(self, trainer, task, outputs, batch, batch_idx, dataloader_idx=0):
        with (task.report_folder / "ink.csv").open("a", encoding="utf-8") as file:
            file.writelines(f"{name},{ink:.4f}\n" for name, ink in zip(batch["id"], outputs["ink"], strict=True))


@dataclass(kw_only=True)
class InkResult(Result):
    """The fraction of ink in an image."""

    ink: float

    def save(self, path):
        path = path.with_suffix(".txt")
        path.write_text(f"{self.ink:.4f}", encoding="utf-8")
        return path


class InkTask(Task):
    """Cross entropy and accuracy of pixels.

    Args:
        ink_weight: Weight of ink in the loss.
        **task: Arguments of `Task`.
    """

    score_metric = "accuracy"

    def __init__(self, ink_weight: float = 1.0, **task: Any) -> None:
        super().__init__(**task)
        self.ink_weight = ink_weight

    def configure_network(self):
        return DenseNetwork(self.build_with_attention(num_classes=0), self.hparams["num_classes"])

    def configure_metrics(self):
        accuracy = MulticlassAccuracy(self.hparams["num_classes"], average="micro", ignore_index=255)
        return {"loss": MeanMetric(), "accuracy": accuracy}

    def training_loss(self, batch):
        weight = torch.tensor([1.0, self.ink_weight], device=self.device)
        return F.cross_entropy(self(batch["image"]), batch["mask"].long(), weight, ignore_index=255)

    def score_batch(self, network, batch, metrics):
        logits, mask = network(batch["image"]), batch["mask"].long()
        metrics["loss"].update(F.cross_entropy(logits, mask, ignore_index=255), len(mask))
        metrics["accuracy"].update(logits, mask)

    def predict_batch(self, network, batch):
        return {"ink": network(batch["image"]).argmax(1).double().mean((1, 2))}

    def image_results(self, predicted):
        return [InkResult(ink=ink) for ink in predicted["ink"].tolist()]

    def run_callbacks(self):
        return [*super().run_callbacks(), InkWriter()]
