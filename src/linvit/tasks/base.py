"""Base class of tasks: the network and its moving average, optimisation, scoring, and checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from linvit.backbones.create import create_backbone, image_channels
from linvit.callbacks.exact_resume import ExactResume
from linvit.callbacks.monitors import ImageGrid, is_logged, on_bar
from linvit.callbacks.predictions import PredictionWriter
from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.registry.signatures import check_choices
from linvit.tasks.execution import Execution, add_up_over_ranks, freeze_parameters, log_at_once, total_over_ranks
from linvit.tasks.model_ema import ModelEma, WeightAveraging
from linvit.tasks.optimisation import Optimisation, batch_size_warning, run_schedule, total_batch_size
from linvit.tasks.parameter_groups import adamw, look_ahead, parameter_groups
from linvit.tasks.pretrained import load_initial_weights, without_download
from linvit.tasks.published import PublishedScores
from linvit.tasks.results import Result
from linvit.tasks.safe_loading import SavedTask, force_safe_loading
from linvit.tasks.teacher import TEACHER, TaskDistillation, Teacher, fill_from_teacher

# Arguments that the command line takes from the data:
SET_BY_DATA = ("num_classes", "class_names", "img_size", "in_chans")


class Description(NamedTuple):
    """Description of an image on a page: prediction and target as text, and classes of pixels (H, W)."""

    predicted: str = ""
    truth: str = ""
    masks: Mapping[str, np.ndarray] = MappingProxyType({})  # by title


class Task(SavedTask):
    """Base of the tasks: builds a network, trains it, and scores its weights and their moving average.

    A subclass names a `score_metric` and supplies `configure_metrics`, `training_loss`, `score_batch`, `predict_batch`
    and, for `linvit.load`, `image_results`. If its network is more than a backbone with a classifier, it overrides
    `configure_network` as well.
    The methods called `configure_...` run within this constructor, so they read `self.hparams`, not attributes that
    a subclass sets later. Arguments are strings, numbers, lists and mappings only, so that every checkpoint opens with
    `weights_only=True`.

    Args:
        backbone: Name, or `{name: ..., option: value}`. See `linvit list backbones`.
        attention: Name, or `{name: ..., option: value}`, or a list with one per stage or block; null keeps the
            backbone's own, and in the list of a student its teacher's. See `linvit list attentions`. Or a layout of
            blocks, `{layout: ..., option: value}`, see `linvit list attentions --layouts`.
        num_classes: Classes. The command line takes it from the data.
        class_names: Names of the classes. The command line takes them from the data.
        img_size: Side, or [H, W], that the backbone is built for. The command line takes it from the data.
        in_chans: Channels C of the images. The command line takes them from the data.
        drop_path_rate: Stochastic depth of the last block.
        pretrained: Weights that the network, or its backbone alone, starts from: a file, or `hf-hub:owner/name`; or
            `{source: ...}` with the options of `linvit.load_pretrained`, such as `min_fraction: 0.5`, or `ema: true`
            for a moving average. On the command line also the folder of a run, to use its best checkpoint.
        teacher: A trained network that this one copies with another attention: a run, a file, or
            `hf-hub:owner/name`; or `{source: ..., attention_weight: 50, ...}` with the options of
            `linvit.tasks.Teacher`.
        freeze: Parts of the network that are not trained, by patterns of their names, such as "backbone", "stages.0" or
            "*.mlp.*". Modules that are frozen whole stay in evaluation mode.
        ema_decay: Decay per step of a moving average of the weights, such as 0.9999; null is none. It is scored beside
            the weights (`val/ema_score`), and its best epoch is kept as `best_ema.ckpt`.
        predict_with: Weights of `forward` in evaluation mode: "raw", or "ema" (moving average). Scores name both.
        compile: Whether torch compiles the network at its first batch, for speed.
        float32_matmul_precision: Of products of float32 matrices in a run, as in torch: "highest", or "high" for
            TensorFloat-32 on GPUs that have it; "medium" may use bfloat16. Attention's sums and inverses stay in
            float32 unless the network is compiled.
        grad_checkpointing: Whether the backward pass computes activations again: less memory, more time.
        recompute_attention: Whether it computes the features and sums of attention again: a fraction of the memory, 10
            to 35 % more time of these layers on a CPU. "auto" keeps them on a GPU with enough memory, as a line says at
            the first step, and else computes them again. Compiled networks decide that themselves.
        attention_kernel: What computes linear attention on a GPU: "torch", its operators; "triton", the kernels of
            `linvit.attention.kernels`, where a mechanism has one; one that another package has registered, by its name;
            "auto" in bfloat16 the kernel that was measured to be the quickest on such a card (H100), and else torch.
        **optimisation: Arguments of `linvit.tasks.optimisation.Optimisation`.

    Attributes:
        network: The trained network: images (B, C, H, W) in, the prediction out.
        ema: Its moving average, or None.
        frozen: Modules that are not trained, which stay in evaluation mode.
        execution: How the network is computed.
        distillation: Trains the network beside its teacher, if it has one.
        report_folder: Where `run_callbacks` write in runs without a logger, `linvit test` and `linvit predict`.
    """

    score_metric: str
    """The metric that is logged as `val/score`; the higher, the better."""
    advanced_options: ClassVar[frozenset[str]] = frozenset(
        {"betas", "no_decay", "schedule", "poly_power", "warmup_steps", "cooldown_epochs", "lr_interval", "lr_delay"}
        | {"lr_base_batch_size", "lr_scaling", "published_batch_size", "backbone_lr_scale", "recompute_attention"}
        | {"attention_kernel", "teacher", "freeze", "new_lr_scale", "float32_matmul_precision", "warmup_lr"}
        | {"cycle_epochs", "cycle_growth", "decay_epochs", "decay_factor", "lookahead"}
    )
    """Options that recipes set and users rarely do: only `--help=all` shows them."""
    evaluation_options: ClassVar[tuple[str, ...]] = ()
    """Options that say only how to evaluate: validate, test and predict take them from the command line."""

    def __init__(
        self,
        backbone: str | dict[str, Any] = "deit_tiny",
        attention: str | dict[str, Any] | list[str | dict[str, Any] | None] | None = None,
        num_classes: int = 1000,
        class_names: list[str] | None = None,
        img_size: int | Sequence[int] = 224,
        in_chans: int = 3,
        drop_path_rate: float = 0.0,
        pretrained: str | dict[str, Any] | None = None,
        teacher: str | dict[str, Any] | None = None,
        freeze: list[str] | None = None,
        ema_decay: float | None = None,
        predict_with: Literal["raw", "ema"] = "raw",
        compile: bool = False,
        float32_matmul_precision: Literal["highest", "high", "medium"] = "highest",
        grad_checkpointing: bool = False,
        recompute_attention: bool | Literal["auto"] = "auto",
        attention_kernel: str = "auto",
        **optimisation: Any,
    ) -> None:
        super().__init__()
        if predict_with == "ema" and ema_decay is None:
            raise UserError("predict_with is 'ema', but this model has no moving average; set --model.predict_with=raw")
        self.optimisation = Optimisation(**optimisation)
        self.teacher = None if teacher is None else Teacher.of(teacher)
        self.execution = Execution(
            compile, float32_matmul_precision, grad_checkpointing, recompute_attention, attention_kernel
        )
        self.save_hyperparameters()
        check_choices(type(self), self.hparams)
        filled = {**asdict(self.optimisation), "attention": fill_from_teacher(attention, self.teacher)}
        self.save_hyperparameters(filled)  # with defaults, and the values that replace null
        self.network = self.configure_network()
        load_initial_weights(self.network, pretrained)
        self.frozen = freeze_parameters(self.network, freeze or [])
        self.ema = None if ema_decay is None else ModelEma(self.network, ema_decay)
        self.execution.apply(self)
        prefixes = ("",) if self.ema is None else ("", "ema_")
        tags = [f"{stage}/{prefix}" for stage in ("val", "test") for prefix in prefixes]
        tags += [TEACHER] * (self.teacher is not None)
        self.metrics = nn.ModuleDict({tag: nn.ModuleDict(self.configure_metrics()) for tag in tags})
        add_up_over_ranks(self.metrics)
        self.example_images = torch.zeros(1, in_chans, *image_size(img_size))
        self._accumulated = 0  # batches since the last optimiser step
        self.report_folder: Path | None = None
        self.distillation = TaskDistillation()

    def configure_network(self) -> nn.Module:
        """Builds the network from images (B, C, H, W) to the prediction; the default is backbone with classifier."""
        return self.build_with_attention(num_classes=self.hparams["num_classes"])

    def measurable_network(self) -> nn.Module:
        """Returns the network to measure: maps images (B, C, H, W) to a tensor that can be differentiated."""
        return self.network

    def configure_metrics(self) -> Mapping[str, Metric]:
        """Returns new metrics by name; called once for each stage and each kind of weights."""
        raise NotImplementedError

    def training_loss(self, batch: dict[str, Any]) -> Tensor:
        """Returns the loss of a training batch, a scalar."""
        raise NotImplementedError

    def score_batch(self, network: nn.Module, batch: dict[str, Any], metrics: Mapping[str, Any]) -> Any:
        """Updates the metrics with a network's output for a batch. The result is passed to the callbacks."""
        raise NotImplementedError

    def predict_batch(self, network: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns the predictions of a network for a batch."""
        raise NotImplementedError

    def image_results(self, predicted: dict[str, Any]) -> Sequence[Result]:
        """Converts the output of `predict_batch` to an object per image, for `linvit.load`; it may take options."""
        raise UserError(f"{type(self).__name__} says nothing of single images: it needs a method `image_results`")

    def describe(self, batch: dict[str, Any], predicted: Mapping[str, Any]) -> Description:
        """Describes a batch of one image for `linvit analyze`, given the output of `predict_batch`."""
        return Description()

    def run_callbacks(self) -> list[Callback]:
        """Returns the callbacks that report on a run of this task, and with a report folder the prediction writer.

        A callback of the same class in the configuration takes its place.
        """
        known = self.report_folder is not None and type(self).image_results is not Task.image_results
        return [ImageGrid(), *([PredictionWriter(self.report_folder)] if known else [])]  # type: ignore[arg-type]

    def published(self) -> PublishedScores | None:
        """Returns the scores that the authors published for exactly this model; None if there are none."""
        return None

    def build_with_attention(self, **options: Any) -> nn.Module:
        """Returns the backbone that the arguments describe; `num_classes=0` builds it without a classifier."""
        backbone = without_download(self.hparams["backbone"])
        options |= {"img_size": self.hparams["img_size"], "drop_path_rate": self.hparams["drop_path_rate"]}
        options |= image_channels(self.hparams["in_chans"])
        return create_backbone(backbone, self.hparams["attention"], **options)

    @property
    def average(self) -> ModelEma | None:
        """The moving average if it is what predicts: `predict_with` is "ema", and it has been updated."""
        return self.ema if self.hparams["predict_with"] == "ema" and self.ema is not None and self.ema.updates else None

    @property
    def predicting(self) -> nn.Module:
        """The network for predictions: the trained one, or its moving average; see `average`."""
        return self.network if self.average is None else self.average.network

    def higher_is_better(self, curve: str) -> bool | None:
        """True if higher values of a curve such as "val/score" are better; None if unknown."""
        name = curve.rpartition("/")[2].removeprefix("ema_")
        if name in ("loss", "score"):
            return name == "score"
        metrics = cast("Mapping[str, Metric]", self.metrics["val/"])
        return metrics[name].higher_is_better if name in metrics else None

    def forward(self, images: Tensor) -> Tensor:
        """Maps images (B, C, H, W) to the predictions of the network.

        In training mode these are the weights that are trained. In evaluation mode (`task.eval()`) they are those that
        `predict_with` names, as on the command line: "raw", or the moving average once it has been updated.
        """
        return (self.network if self.training else self.predicting)(images)  # type: ignore[no-any-return]

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Logs a metric. A number stays on the host with all its digits; Lightning would move it, and synchronise.

        A tensor under `train/` is averaged over the ranks in steps that are logged, and in the last of an epoch or run.
        """
        if isinstance(value, float | int) and not options.get("sync_dist"):
            value = torch.tensor(float(value), dtype=torch.float64)
        elif isinstance(value, Tensor) and name.startswith("train/") and (ranks := self.trainer.world_size) > 1:
            last = self.trainer.is_last_batch or self.trainer.global_step + 1 == self.trainer.max_steps
            value = total_over_ranks(value) / ranks if last or is_logged(self.trainer) else value
        super().log(name, value, *args, **options)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """Returns and logs the loss; with a teacher the weighted sum of the task's and the matching loss."""
        loss = self.distillation.training_loss(self, batch)
        self.log("train/loss", loss, prog_bar=on_bar(self.trainer))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Logs the metrics; returns what `score_batch` returned for "raw" and, if it was scored, for "ema"."""
        self.distillation.validate(self, batch, batch_idx)
        return self._evaluate(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Logs the metrics; returns what `score_batch` returned for "raw" and, if it was scored, for "ema"."""
        return self._evaluate(batch, "test")

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        """Returns the predictions of the weights that `predict_with` selects."""
        return self.predict_batch(self.predicting, batch)

    def _evaluate(self, batch: dict[str, Any], stage: str) -> dict[str, Any]:
        """Scores the weights and, once it has been updated, their moving average."""
        networks: list[tuple[str, str, nn.Module]] = [("raw", f"{stage}/", self.network)]
        if self.ema is not None and self.ema.updates:
            networks.append(("ema", f"{stage}/ema_", self.ema))
        outputs, size = {}, len(batch["image"])
        for weights, tag, network in networks:
            metrics = cast("dict[str, Metric]", self.metrics[tag])
            outputs[weights] = self.score_batch(network, batch, metrics)
            for name, metric in metrics.items():  # devices exchange nothing before the end of the set
                self.log(f"{tag}{name}", metric, batch_size=size)
            self.log(f"{tag}score", metrics[self.score_metric], prog_bar=tag == "val/", batch_size=size)
        return outputs

    def configure_callbacks(self) -> list[Callback]:
        """Returns the task's callbacks, and those of `run_callbacks` whose class the trainer does not have yet."""
        present: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        others = [ExactResume(), WeightAveraging(), *self.run_callbacks()]
        return [
            *(own for own in [self.execution, self.distillation] if own not in present),
            *(own for own in others if not any(isinstance(other, type(own)) for other in present)),
        ]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Builds AdamW and its schedule; warns if the learning rate was not chosen for the total batch size."""
        settings, schedule = self.optimisation, run_schedule(self.optimisation, self.trainer)
        groups = [{**group, "lr": schedule.peak * group["lr"]} for group in self._groups]
        betas = (settings.betas[0], settings.betas[1])
        fused = self.trainer.strategy.root_device.type in ("cpu", "cuda")
        optimizer = adamw(groups, schedule.peak, betas, fused)
        if settings.lookahead is not None:
            look_ahead(optimizer, settings.lookahead)
        batch = total_batch_size(self.trainer)
        rank_zero_info(f"total batch {batch}, learning rate {schedule.peak:.4g}")
        if warning := batch_size_warning(settings, self.trainer, schedule, getattr(self, "_trained_with", None)):
            rank_zero_warn(warning)
        for logger in self.loggers:
            logger.log_hyperparams({"total_batch": batch, "peak_lr": schedule.peak})
        scheduler = schedule.scheduler(optimizer, "epoch" if self.trainer.max_steps == -1 else "step")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def backward(self, loss: Tensor, *args: Any, **options: Any) -> None:
        """Adds the gradient of a batch, so that the gradient of a step is the mean over its batches.

        The last step of an epoch and the first after a resume may have fewer batches than `accumulate_grad_batches`,
        by which Lightning divides.
        """
        super().backward(loss, *args, **options)
        self._accumulated += 1
        trainer, batches = self.trainer, self.trainer.fit_loop.batch_idx + 1
        window, last = trainer.accumulate_grad_batches, trainer.is_last_batch or batches == trainer.num_training_batches
        if batches % window and not last:
            return
        if self._accumulated != window:
            for weight in self.parameters():
                if weight.grad is not None:
                    weight.grad *= window / self._accumulated
        self._accumulated = 0

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **options: Any) -> None:
        """Clips gradients, without synchronising where the loss scaler of 16-mixed lets a fused optimiser skip."""
        super().configure_gradient_clipping(optimizer, *args, **options)
        if all(group.get("fused") for group in optimizer.param_groups):
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Makes the trainer open checkpoints safely, and groups parameters."""
        force_safe_loading(self.trainer.strategy, self)
        log_at_once(self.trainer)
        self._accumulated = 0
        if stage == "fit":  # while the parameters have their shapes and names, which FSDP takes from them
            own = self.optimisation
            scales = self.distillation.lr_scales(own.new_lr_scale)
            self._groups = parameter_groups(
                self, 1.0, own.weight_decay, own.layer_decay, own.backbone_lr_scale, own.no_decay, scales
            )

    def train(self, mode: bool = True) -> Self:
        """Switches to training or evaluation mode; modules that are frozen whole stay in evaluation mode."""
        super().train(mode)
        for module in self.frozen:
            module.eval()
        return self
