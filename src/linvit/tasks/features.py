"""Task of a student that learns a teacher's features from images alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, Metric

from linvit.errors import UserError
from linvit.io.files import rewriting
from linvit.tasks.base import Task
from linvit.tasks.results import Result
from linvit.tasks.teacher import teacher_network

ALONE = "FeatureTask learns from a teacher alone, to which it is compared: set --model.teacher, with task_weight: 0"


@dataclass(kw_only=True)
class FeatureResult(Result):
    """The pooled features (D,) of an image."""

    features: np.ndarray

    def save(self, path: str | Path) -> Path:
        """Writes `path` with the ending .npy, for `numpy.load`."""
        path = Path(f"{str(path).removesuffix('.npy')}.npy")
        with rewriting(path, durable=False) as part:
            np.save(part, self.features)
        return path


class FeatureTask(Task):
    """Learns a teacher's features of images without labels; `val/score` is the cosine similarity of both features.

    The network has no classifier: its output is the backbone's pooled features (B, D). Needs `teacher` with
    `task_weight: 0`, even for evaluation.

    Args:
        **task: Arguments of `Task`: backbone, attention, teacher, optimisation.

    Example:
        $ linvit linearize --teacher timm:vit_small_patch14_dinov2 --model.attention=efficient --data.source=PATH
    """

    score_metric = "similarity"

    def configure_network(self) -> nn.Module:
        """Returns the backbone without a classifier."""
        return self.build_with_attention(num_classes=0)

    def configure_metrics(self) -> Mapping[str, Metric]:
        """Returns the mean over images of the cosine of the angle between the features of both: 1 is the same."""
        return {"similarity": MeanMetric(nan_strategy="disable")}

    def training_loss(self, batch: dict[str, Any]) -> Tensor:
        """Raises a `UserError`: there are no labels."""
        raise UserError(ALONE)

    def score_batch(self, network: nn.Module, batch: dict[str, Any], metrics: Mapping[str, Any]) -> Tensor:
        """Updates the similarity; returns the features (B, D)."""
        features: Tensor = network(batch["image"])
        distance = self.distillation.distance
        target = (self._reference if distance is None else distance.teacher)(batch["image"])
        metrics["similarity"].update(F.cosine_similarity(features.float(), target.float(), dim=1))
        return features

    def predict_batch(self, network: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Ids (B) and features (B, D)."""
        return {"id": batch["id"], "features": network(batch["image"])}

    def image_results(self, predicted: dict[str, Any]) -> list[FeatureResult]:
        """Returns the features of each image."""
        return [FeatureResult(features=each) for each in predicted["features"].float().cpu().numpy()]

    @cached_property
    def _reference(self) -> nn.Module:
        """The teacher, where nothing is trained; no submodule, so that no checkpoint has it."""
        if self.teacher is None:
            raise UserError(ALONE)
        return teacher_network(self, self.teacher).eval().to(self.device)
