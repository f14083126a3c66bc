"""What every task shares: backbone, optimiser, schedule."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from linvit.errors import UserError, check_choice
from linvit.image_size import image_size
from linvit.optim import parameter_groups, warmup_cosine
from linvit.registry import backbones, parameters_of
from linvit.weights.load import Report, load_pretrained

FACTS = ("num_classes", "class_names", "img_size")  # arguments that the data sets


class Task(LightningModule):
    """Base of the tasks. A subclass supplies its steps and metrics, and logs `val/score`, the higher the better.

    Arguments are strings, numbers, lists and mappings only, so that every checkpoint opens with `weights_only=True`.

    Args:
        backbone: Name, or `{name: ..., option: value}`. See `linvit list backbones`.
        attention: Name, or `{name: ..., option: value}`, or a list with one per stage or block; null is the backbone's
            own. See `linvit list attentions`.
        num_classes: Classes. The command line takes it from the data.
        class_names: Names of the classes. The command line takes them from the data.
        img_size: Side, or [H, W], that the backbone is built for. The command line takes it from the data.
        drop_path_rate: Stochastic depth of the last block.
        pretrained: Weights that the backbone starts from: a file, or `hf-hub:owner/name`; or `{source: ...}` with the
            options of `linvit.load_pretrained`, such as `min_share: 0.5`.
        lr: Peak learning rate.
        weight_decay: AdamW's decay; spared are norms, biases, and what the backbone names (`no_weight_decay`).
        betas: AdamW's momentum terms.
        warmup_epochs: Length of the linear warm-up.
        warmup_lr: Learning rate of the first step.
        min_lr: Learning rate of the last step.
    """

    def __init__(
        self,
        backbone: str | dict[str, Any] = "deit_tiny",
        attention: str | dict[str, Any] | list[str | dict[str, Any]] | None = None,
        num_classes: int = 1000,
        class_names: list[str] | None = None,
        img_size: int | Sequence[int] = 224,
        drop_path_rate: float = 0.0,
        pretrained: str | dict[str, Any] | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
        betas: tuple[float, float] = (0.9, 0.999),
        warmup_epochs: float = 5,
        warmup_lr: float = 1e-6,
        min_lr: float = 1e-5,
    ) -> None:
        super().__init__()
        if lr <= 0:
            raise UserError(f"lr must be positive; got {lr}")
        self.save_hyperparameters()
        name, _ = backbones.parse(backbone)
        if attention is not None and "attention" not in parameters_of(backbones.get(name)):
            raise UserError(
                f"backbone '{name}' brings its own attention, so {attention!r} cannot go into it; "
                f"set --model.attention=null"
            )
        options = {} if attention is None else {"attention": attention}
        self.backbone: nn.Module = backbones.create(
            backbone, num_classes=num_classes, img_size=img_size, drop_path_rate=drop_path_rate, **options
        )
        if pretrained is not None:
            rank_zero_info(str(_load(self.backbone, pretrained)))
        self.example_input_array = torch.zeros(1, 3, *image_size(img_size))

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to what the task predicts."""
        return self.backbone(images)  # type: ignore[no-any-return]

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Self:
        """Lightning's, without `pretrained`: the checkpoint has the weights, and the first file may be gone."""
        return super().load_from_checkpoint(*args, **{"pretrained": None, **kwargs})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keeps on record what the weights of a run that goes on began from."""
        self.hparams["pretrained"] = checkpoint.get("hyper_parameters", {}).get("pretrained")

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with linear warm-up and cosine decay, per step."""
        hp = self.hparams
        total = self.trainer.estimated_stepping_batches
        if not math.isfinite(total):
            raise UserError("the cosine schedule needs an end: set trainer.max_epochs or trainer.max_steps")
        optimizer = torch.optim.AdamW(parameter_groups(self, hp["weight_decay"]), lr=hp["lr"], betas=tuple(hp["betas"]))
        scheduler = warmup_cosine(
            optimizer, self._warmup_steps(int(total)), int(total), hp["lr"], hp["warmup_lr"], hp["min_lr"]
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _warmup_steps(self, total: int) -> int:
        epochs = self.hparams["warmup_epochs"]
        if not epochs or not self.trainer.limit_train_batches:
            return 0
        self.trainer.fit_loop.setup_data()  # only now is the number of batches known
        batches = self.trainer.num_training_batches / self.trainer.accumulate_grad_batches
        if not math.isfinite(batches):
            raise UserError("a warm-up in epochs needs data of known length; set --model.warmup_epochs=0")
        steps: int = round(epochs * batches)
        if steps > total:
            rank_zero_warn(
                f"the warm-up of {epochs} epochs ({steps} steps) is longer than the run "
                f"({total} steps); it is cut to the run. Lower --model.warmup_epochs"
            )
        return min(steps, total)


def _load(backbone: nn.Module, pretrained: str | Mapping[str, Any]) -> Report:
    """Loads what `pretrained` says."""
    options = {"source": pretrained} if isinstance(pretrained, str) else dict(pretrained)
    allowed = [name for name in parameters_of(load_pretrained) if name != "model"]
    for option in options:
        check_choice("an option of pretrained", option, allowed)
    if not isinstance(options.get("source"), str):
        raise UserError(
            f"pretrained {pretrained!r} names no source. Write pretrained: FILE, or pretrained: {{source: FILE}}"
        )
    return load_pretrained(backbone, **options)
