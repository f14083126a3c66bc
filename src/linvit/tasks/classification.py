"""Image classification: one class per image."""

from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from linvit.errors import UserError
from linvit.tasks.base import Task
from linvit.tasks.mixing import Mixing


class ClassificationTask(Task):
    """Cross entropy, top-1 and top-5 accuracy; `val/score` is top-1.

    Args:
        label_smoothing: Share of the target spread over all classes while training.
        mixup_alpha: Beta(alpha, alpha) of mixup; 0 is off.
        cutmix_alpha: Beta(alpha, alpha) of CutMix; 0 is off. With both, each batch takes one at random.
        mix_prob: Share of the batches that are mixed at all.
        mix_switch: Share of the mixed batches that take CutMix, where both are on.
        **task: Arguments of `Task`: backbone, attention, optimiser, schedule.

    Example:
        $ linvit fit --config quickstart --model.backbone=deit_nano --model.attention=linear
    """

    def __init__(
        self,
        label_smoothing: float = 0.1,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        mix_prob: float = 1.0,
        mix_switch: float = 0.5,
        **task: Any,
    ) -> None:
        super().__init__(**task)
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing must lie in [0, 1); got {label_smoothing}")
        self.mixing = Mixing(mixup_alpha, cutmix_alpha, mix_prob, mix_switch)
        num_classes = self.hparams["num_classes"]
        tops = [top for top in (1, 5) if top < num_classes or top == 1]
        accuracies = MetricCollection(
            {f"top{top}": MulticlassAccuracy(num_classes, top_k=top, average="micro") for top in tops}
        )
        whose = ("", "ema_") if self.ema is not None else ("",)
        prefixes = [f"{stage}/{weights}" for stage in ("val", "test") for weights in whose]
        self.metrics = nn.ModuleDict({prefix: accuracies.clone(prefix) for prefix in prefixes})
        # Not sync_dist: Lightning divides by the rounded mean of the devices' images. NaN is seen without looking.
        self.losses = nn.ModuleDict({prefix: MeanMetric(nan_strategy="disable") for prefix in prefixes})

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Cross entropy against smoothed, possibly mixed targets.

        Raises:
            UserError: If batches are to be mixed and have no `seed`, an int from which the mixing is drawn.
        """
        image, target = batch["image"], batch["label"]
        if self.mixing.active:
            if "seed" not in batch:
                raise UserError(
                    "mixup and CutMix are drawn from batch['seed'], an int of each batch, and this data has none. Add "
                    "it, or set --model.mixup_alpha=0 --model.cutmix_alpha=0"
                )
            image, target = self.mixing(image, target, self.hparams["num_classes"], batch["seed"])
        if "after_mixing" in batch:  # random erasing, in the recipes that mix first
            image = batch["after_mixing"](image)
        loss = F.cross_entropy(self(image), target, label_smoothing=self.hparams["label_smoothing"])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Plain cross entropy, top-1, top-5 and score; returns the predicted classes, see `_evaluate`."""
        return self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        """Plain cross entropy, top-1, top-5 and score; returns the predicted classes, see `_evaluate`."""
        return self._evaluate(batch, "test")

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Ids (B), predicted class indices (B,) and their probabilities (B,)."""
        network = self.ema if self.hparams["predict_with"] == "ema" else self
        probability, index = network(batch["image"]).softmax(-1).max(-1)  # type: ignore[misc]
        return {"id": batch["id"], "class": index, "probability": probability}

    def _evaluate(self, batch: dict[str, Any], stage: str) -> dict[str, Tensor]:
        """Scores the weights and, once it has been updated, their moving average.

        Returns:
            Predicted classes (B,): "raw" and, if it was scored, "ema".
        """
        predicted = {"raw": self._score(self(batch["image"]), batch["label"], f"{stage}/")}
        if self.ema is not None and self.ema.updates:
            predicted["ema"] = self._score(self.ema(batch["image"]), batch["label"], f"{stage}/ema_")
        return predicted

    def _score(self, logits: Tensor, label: Tensor, prefix: str) -> Tensor:
        """Logs logits (B, K) against labels (B,); devices exchange nothing before the end of the set."""
        metrics, loss = cast("MetricCollection", self.metrics[prefix]), cast("MeanMetric", self.losses[prefix])
        size = len(label)
        metrics.update(logits, label)
        loss.update(F.cross_entropy(logits, label, reduction="none"))
        self.log(f"{prefix}loss", loss, batch_size=size)
        self.log_dict(metrics, batch_size=size)
        self.log(f"{prefix}score", metrics["top1"], prog_bar=prefix == "val/", batch_size=size)
        return logits.argmax(-1)
