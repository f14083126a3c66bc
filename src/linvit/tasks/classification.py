"""Image classification: one class per image."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy
from torchvision.transforms import v2

from linvit.errors import UserError
from linvit.tasks.base import Task


class ClassificationTask(Task):
    """Cross entropy, top-1 and top-5 accuracy; `val/score` is top-1.

    Args:
        label_smoothing: Share of the target spread over all classes while training.
        mixup_alpha: Beta(alpha, alpha) of mixup; 0 is off.
        cutmix_alpha: Beta(alpha, alpha) of CutMix; 0 is off. With both, each batch takes one at random.
        **task: Arguments of `Task`: backbone, attention, optimiser, schedule.

    Example:
        $ linvit fit --config configs/quickstart.yaml --model.backbone=deit_nano --model.attention=linear
    """

    def __init__(
        self,
        label_smoothing: float = 0.1,
        mixup_alpha: float = 0.0,
        cutmix_alpha: float = 0.0,
        **task: Any,
    ) -> None:
        super().__init__(**task)
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing must lie in [0, 1); got {label_smoothing}")
        if mixup_alpha < 0 or cutmix_alpha < 0:
            raise UserError(f"mixup_alpha and cutmix_alpha must be 0 (off) or more; got {mixup_alpha}, {cutmix_alpha}")
        num_classes = self.hparams["num_classes"]
        mixes: list[v2.Transform] = []
        if mixup_alpha:
            mixes.append(v2.MixUp(alpha=mixup_alpha, num_classes=num_classes))
        if cutmix_alpha:
            mixes.append(v2.CutMix(alpha=cutmix_alpha, num_classes=num_classes))
        self.mix = v2.RandomChoice(mixes) if mixes else None

        tops = [top for top in (1, 5) if top < num_classes or top == 1]
        accuracies = {f"top{top}": MulticlassAccuracy(num_classes, top_k=top, average="micro") for top in tops}
        self.val_metrics = MetricCollection(dict(accuracies), prefix="val/")
        self.test_metrics = self.val_metrics.clone(prefix="test/")

    def on_after_batch_transfer(self, batch: dict[str, Any], dataloader_idx: int) -> dict[str, Any]:
        """Mixes training images and labels, on the device."""
        summary = not isinstance(batch, dict)  # Lightning's model summary sends bare images through here
        if self.mix is not None and self.trainer.training and not summary:
            image, label = self.mix(batch["image"], batch["label"])
            return {**batch, "image": image, "label": label}
        return batch

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Cross entropy against smoothed, possibly mixed targets."""
        logits = self(batch["image"])
        loss = F.cross_entropy(logits, batch["label"], label_smoothing=self.hparams["label_smoothing"])
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Plain cross entropy, top-1, top-5 and score."""
        self._evaluate(batch, self.val_metrics, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Plain cross entropy, top-1, top-5 and score."""
        self._evaluate(batch, self.test_metrics, "test")

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Ids (B), predicted class indices (B,) and their probabilities (B,)."""
        probability, index = self(batch["image"]).softmax(-1).max(-1)
        return {"id": batch["id"], "class": index, "probability": probability}

    def _evaluate(self, batch: dict[str, Any], metrics: MetricCollection, stage: str) -> None:
        logits, label = self(batch["image"]), batch["label"]
        metrics.update(logits, label)
        size = len(label)
        self.log(f"{stage}/loss", F.cross_entropy(logits, label), batch_size=size, sync_dist=True)
        self.log_dict(metrics, batch_size=size)
        self.log(f"{stage}/score", metrics["top1"], prog_bar=True, batch_size=size)
