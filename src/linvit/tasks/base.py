"""What every task shares: backbone, optimiser, schedule."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from linvit.errors import UserError, check_choice
from linvit.image_size import image_size
from linvit.optim import parameter_groups
from linvit.registry import backbones, parameters_of, takes
from linvit.tasks.average import Average, check_averaging
from linvit.tasks.checks import check_optimisation
from linvit.tasks.execution import checkpoint_gradients, exchange_buffers, same_buffers
from linvit.tasks.schedule import run_schedule
from linvit.tasks.total_batch import batch_warning, total_batch
from linvit.weights.load import load_pretrained
from linvit.weights.report import Report

FACTS = ("num_classes", "class_names", "img_size")  # arguments that the data sets
EXECUTION = ("predict_with", "compile", "grad_checkpointing")  # make no other model: free with any checkpoint


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
            options of `linvit.load_pretrained`, such as `min_fraction: 0.5`, or `ema: true` for a moving average.
        lr: Peak learning rate.
        weight_decay: AdamW's decay; spared are norms, biases, and what the backbone names (`no_weight_decay`).
        betas: AdamW's momentum terms.
        warmup_epochs: Length of the linear warm-up.
        warmup_lr: Learning rate of the first step.
        min_lr: Learning rate of the last step, and of the cool-down.
        cooldown_epochs: Epochs at `min_lr` at the end of the run; `trainer.max_epochs` counts them in.
        lr_interval: The rate changes with every "step" or only with every "epoch".
        lr_lag: By how many intervals the rate trails its formula; 1 as in timm's training script and those like it.
        lr_batch: Total batch (all devices, accumulation included) that the rates are given for: they are multiplied by
            the run's total batch over this one. null takes them as they are.
        lr_scaled: Which of the rates that holds for: "all", or "peak" for `lr` alone.
        published_batch: Total batch that the recipe was published with; a run with another one is warned. null is none.
        layer_decay: Factor on the rate per layer down from the last, for fine-tuning; null is none.
        body_lr_scale: Factor on `lr` for all but the classifier, for fine-tuning with a new one; `min_lr` stays.
        ema_decay: Decay per step of a moving average of the weights, such as 0.9999; null is none. It is scored beside
            the weights (`val/ema_score`), and its best epoch is kept as `best_ema.ckpt`.
        predict_with: Weights that predict: "raw", or "ema" for their moving average. Scores name both.
        compile: Whether torch compiles the backbone at its first batch, for speed.
        grad_checkpointing: Whether the backward pass computes activations anew: less memory, more time.
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
        cooldown_epochs: float = 0,
        lr_interval: Literal["step", "epoch"] = "step",
        lr_lag: int = 0,
        lr_batch: int | None = None,
        lr_scaled: Literal["all", "peak"] = "peak",
        published_batch: int | None = None,
        layer_decay: float | None = None,
        body_lr_scale: float = 1.0,
        ema_decay: float | None = None,
        predict_with: Literal["raw", "ema"] = "raw",
        compile: bool = False,
        grad_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        check_choice("predict_with", predict_with, ["raw", "ema"])
        if predict_with == "ema" and ema_decay is None:
            raise UserError("predict_with is 'ema', but this model has no moving average; set --model.predict_with=raw")
        self.save_hyperparameters()
        check_optimisation(self.hparams)
        name, _ = backbones.parse(backbone)
        if attention is not None and not takes(backbones.get(name), "attention"):
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
        self.ema = None if ema_decay is None else Average(self.backbone, ema_decay)
        if grad_checkpointing:
            checkpoint_gradients(self.backbone)
        if compile:  # in place, so that no name of a weight changes
            for network in (self.backbone, *([self.ema.network] if self.ema else [])):
                network.compile()
        self.example_input_array = torch.zeros(1, 3, *image_size(img_size))

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) to what the task predicts."""
        return self.backbone(images)  # type: ignore[no-any-return]

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> Self:
        """Lightning's, without `pretrained`: the checkpoint has the weights, and the first file may be gone."""
        return super().load_from_checkpoint(*args, **{"pretrained": None, **kwargs})

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with linear warm-up and cosine decay; warns once of a total batch that these are not meant for."""
        hp, schedule = self.hparams, run_schedule(self.hparams, self.trainer)
        groups = parameter_groups(self, schedule.peak, hp["weight_decay"], hp["layer_decay"], hp["body_lr_scale"])
        optimizer = torch.optim.AdamW(groups, lr=schedule.peak, betas=tuple(hp["betas"]))
        if self.ema is not None:
            ema = self.ema
            optimizer.register_step_post_hook(lambda *_: ema.update(self.backbone))
        batch = total_batch(self.trainer)
        rank_zero_info(f"total batch {batch}, learning rate {schedule.peak:.4g}")
        if warning := batch_warning(hp, self.trainer, schedule, getattr(self, "_trained_with", None)):
            rank_zero_warn(warning)
        for logger in self.loggers:
            logger.log_hyperparams({"total_batch": batch, "peak_lr": schedule.peak})
        keeps: Literal["epoch", "step"] = "epoch" if self.trainer.max_steps == -1 else "step"
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule.scheduler(optimizer, keeps), "interval": "step"},
        }

    def setup(self, stage: str) -> None:
        """Raises a `UserError` for a moving average that could not be kept right."""
        if stage == "fit" and self.ema is not None:
            check_averaging(self.trainer)

    def on_validation_start(self) -> None:
        """Before evaluation on unequal shares."""
        same_buffers(self)

    def on_validation_end(self) -> None:
        """After evaluation on unequal shares."""
        exchange_buffers(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Writes down what the learning rate was scaled by, and how old the moving average is."""
        checkpoint["total_batch"] = total_batch(self.trainer)
        if self.ema is not None:
            checkpoint["ema_updates"] = self.ema.updates

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remembers of the run that is continued: its total batch, the age of its moving average, its first weights."""
        self.hparams["pretrained"] = checkpoint.get("hyper_parameters", {}).get("pretrained")
        self._trained_with = checkpoint.get("total_batch")
        if self.ema is not None:
            self.ema.updates = checkpoint["ema_updates"]


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
