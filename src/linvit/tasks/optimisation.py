"""Settings of the optimiser and the learning rate, and the resulting schedule and total batch size of a run."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from linvit.errors import UserError, check_number
from linvit.registry.signatures import check_choices
from linvit.tasks.schedules import CosineCycles, Schedule, WarmupCosine, WarmupPoly, WarmupSteps


@dataclass(frozen=True)
class Optimisation:
    """Settings of AdamW and of the learning rate over a run: linear warm-up, then a decay, then a cool-down.

    Every task takes them as arguments (`--model.lr`). The options of the schedule cover the differences between the
    papers' programs.

    Attributes:
        lr: Peak learning rate, before `lr_base_batch_size` scales it. A run prints the effective one when it starts.
        weight_decay: AdamW's weight decay.
        no_decay: Which parameters are not decayed: those whose names contain one of these, such as [norm, bias]; none
            for an empty list. null: norms, biases, and the network's `no_weight_decay()`.
        betas: AdamW's momentum terms.
        lookahead: Period in steps after which weights move half-way back to their values one period before
            (Zhang et al. 2019, "Lookahead Optimizer"), such as 5; null is never.
        schedule: How the learning rate decays: "cosine", over the whole run, or "cosine_after_warmup", over the
            rest of it; "poly"; "steps", by a factor after some epochs; "cosine_restarts", repeatedly from `lr`
            (torch's CosineAnnealingWarmRestarts); or "cosine_wave", down and up again (torch's CosineAnnealingLR beyond
            T_max).
        decay_epochs: Epochs after which the learning rate of "steps" falls, such as [8, 11].
        decay_factor: Factor of the learning rate at each of them.
        poly_power: Power of the polynomial decay; 1 is linear.
        cycle_epochs: Length of the first half cosine of "cosine_restarts" and "cosine_wave".
        cycle_growth: Ratio of the length of each half cosine to the previous one.
        warmup_epochs: Length of the linear warm-up.
        warmup_steps: Its length in optimiser steps, in place of `warmup_epochs`; null is none.
        warmup_lr: Learning rate of the first step.
        min_lr: Learning rate of the last step, and of the cool-down.
        cooldown_epochs: Epochs at `min_lr` at the end of the run; `trainer.max_epochs` includes them.
        lr_interval: Whether the learning rate changes with every "step" or only with every "epoch".
        lr_delay: By how many intervals the learning rate lags behind its formula; 1 in timm's training script and
            those derived from it.
        lr_base_batch_size: Total batch size (all devices, accumulation included) that the learning rates are given
            for. They are multiplied by the run's total batch size over this one. null uses them as they are.
        lr_scaling: Which learning rates are multiplied: "all" of them, or "peak" for `lr` alone.
        published_batch_size: Total batch size that the recipe was published with; a run with another one gets a
            warning. null is none.
        layer_decay: Factor on the learning rate per layer down from the last, for fine-tuning; null is none.
        backbone_lr_scale: Factor on `lr` for all parameters but the classifier's, for fine-tuning with a new
            classifier, or for a backbone before a head; `min_lr` stays.
        new_lr_scale: Factor on `lr` for the parameters that a student does not have from its `teacher`.
    """

    lr: float = 1e-3
    weight_decay: float = 0.05
    no_decay: list[str] | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    lookahead: int | None = None
    schedule: Literal["cosine", "cosine_after_warmup", "poly", "steps", "cosine_restarts", "cosine_wave"] = "cosine"
    decay_epochs: list[float] = field(default_factory=list)
    decay_factor: float = 0.1
    poly_power: float = 1.0
    cycle_epochs: float = 10
    cycle_growth: float = 1
    warmup_epochs: float = 5
    warmup_steps: int | None = None
    warmup_lr: float = 1e-6
    min_lr: float = 1e-5
    cooldown_epochs: float = 0
    lr_interval: Literal["step", "epoch"] = "step"
    lr_delay: int = 0
    lr_base_batch_size: int | None = None
    lr_scaling: Literal["all", "peak"] = "peak"
    published_batch_size: int | None = None
    layer_decay: float | None = None
    backbone_lr_scale: float = 1.0
    new_lr_scale: float = 1.0

    def __post_init__(self) -> None:
        check_choices(Optimisation, vars(self))
        for name in ("lr", "poly_power", "cycle_epochs", "backbone_lr_scale", "new_lr_scale"):
            check_number(name, getattr(self, name), above=0)
        for name in ("min_lr", "warmup_lr", "weight_decay", "warmup_epochs", "cooldown_epochs", "lr_delay"):
            check_number(name, getattr(self, name), at_least=0, whole=name == "lr_delay")
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise UserError(f"betas must be two numbers, such as [0.9, 0.999]; got {self.betas!r}")
        for beta in self.betas:
            check_number("betas", beta, at_least=0, below=1)
        if self.no_decay is not None and not all(isinstance(name, str) for name in self.no_decay):
            raise UserError(f"no_decay must be a list of parts of names, such as [norm, bias]; got {self.no_decay!r}")
        for epoch in self.decay_epochs:
            check_number("decay_epochs", epoch, above=0)
        if (self.schedule == "steps") != bool(self.decay_epochs):
            raise UserError(
                f"the schedule is '{self.schedule}' and decay_epochs is {self.decay_epochs}: --model.decay_epochs, "
                f"such as [8, 11], goes with --model.schedule=steps, and only with it"
            )
        check_number("decay_factor", self.decay_factor, above=0, below=1)
        check_number("cycle_growth", self.cycle_growth, at_least=1)
        least_of = {"lookahead": 1, "warmup_steps": 0, "lr_base_batch_size": 1, "published_batch_size": 1}
        for name, least in least_of.items():
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), at_least=least, whole=True, note=", or null for none")
        if self.layer_decay is not None:
            check_number("layer_decay", self.layer_decay, above=0, at_most=1, note=", such as 0.75, or null for none")


def run_schedule(settings: Optimisation, trainer: Trainer) -> Schedule:
    """Returns the learning-rate schedule of the run that a trainer is about to start."""
    if any(isinstance(one, GradientAccumulationScheduler) for one in trainer.callbacks):  # type: ignore[attr-defined]
        raise UserError(
            "the learning rate needs the number of steps, which GradientAccumulationScheduler changes during the run: "
            "leave it out of --trainer.callbacks, and set --trainer.accumulate_grad_batches"
        )
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps):
        raise UserError("the learning rate needs an end to decay to: set trainer.max_epochs or trainer.max_steps")
    trainer.fit_loop.setup_data()  # only now is the number of batches known
    batches = trainer.num_training_batches if trainer.limit_train_batches else 0
    per_epoch = batches / trainer.accumulate_grad_batches
    if not math.isfinite(per_epoch):
        warmup_epochs = settings.warmup_epochs if settings.warmup_steps is None else 0
        in_epochs = settings.lr_interval == "epoch" or settings.schedule not in ("cosine", "poly")
        if warmup_epochs or settings.cooldown_epochs or in_epochs:
            raise UserError(
                "epochs of data of unknown length cannot be counted; set --model.warmup_steps, "
                "--model.cooldown_epochs=0, --model.lr_interval=step and --model.schedule=cosine or poly"
            )
        per_epoch = steps  # the run as one epoch
    per_epoch = max(math.ceil(per_epoch), 1)
    epochs = steps / per_epoch
    short = trainer.fast_dev_run or not batches  # type: ignore[attr-defined]  # nothing that a schedule could fit
    cooldown = 0 if short else settings.cooldown_epochs
    if cooldown and cooldown >= epochs:
        raise UserError(
            f"cooldown_epochs ({cooldown}) must be less than the run's {epochs:.4g} epochs; "
            f"lower --model.cooldown_epochs or raise --trainer.max_epochs"
        )
    total = epochs - cooldown
    wanted = settings.warmup_epochs if settings.warmup_steps is None else settings.warmup_steps / per_epoch
    warmup = min(wanted, total)
    if warmup and warmup == total and not short:
        rank_zero_warn(
            f"the warm-up of {wanted:.6g} epochs leaves no time for the decay in a run of {epochs:.6g} epochs, "
            f"{cooldown:g} of them cool-down. Lower --model.warmup_epochs or warmup_steps, or train for longer"
        )
    base = settings.lr_base_batch_size
    scale = 1.0 if base is None else (total_batch_size(trainer) or base) / base  # without training batches: 1
    others = scale if settings.lr_scaling == "all" else 1.0
    cycles = partial(CosineCycles, cycle=settings.cycle_epochs, growth=settings.cycle_growth)
    shapes: dict[str, Callable[..., Schedule]] = {
        "cosine": WarmupCosine,
        "cosine_after_warmup": partial(WarmupCosine, shifted=True),
        "poly": partial(WarmupPoly, power=settings.poly_power),
        "steps": partial(WarmupSteps, epochs=settings.decay_epochs, factor=settings.decay_factor),
        "cosine_restarts": cycles,
        "cosine_wave": partial(cycles, wave=True),
    }
    schedule = shapes[settings.schedule](
        peak=settings.lr * scale,
        start=settings.warmup_lr * others,
        end=settings.min_lr * others,
        warmup=warmup,
        total=total,
        steps_per_epoch=per_epoch,
        interval=settings.lr_interval,
        delay=settings.lr_delay,
    )
    ends = {"min_lr": (schedule.end, "rises in the decay")}
    ends |= {"warmup_lr": (schedule.start, "falls in the warm-up")} if warmup else {}
    for name, (rate, wrong) in ends.items():
        if rate > schedule.peak:
            rank_zero_warn(
                f"{name} ({rate:.4g} in this run) is above the peak of the learning rate, {schedule.peak:.4g}, so that "
                f"the learning rate {wrong}. Lower --model.{name}, or raise --model.lr"
            )
    return schedule


def total_batch_size(trainer: Trainer) -> int:
    """Returns images per optimiser step, over all devices, with accumulation; 0 for a run without training."""
    trainer.fit_loop.setup_data()
    loader = cast("DataLoader[Any] | None", trainer.train_dataloader)
    if loader is None:
        return 0
    packed = getattr(loader.sampler, "mean_images", None)  # of a batch by tokens
    batch: int = round(packed) if packed else loader.batch_size or loader.batch_sampler.batch_size  # type: ignore[union-attr]
    return batch * trainer.world_size * trainer.accumulate_grad_batches


def batch_size_warning(settings: Optimisation, trainer: Trainer, schedule: Schedule, before: int | None) -> str:
    """Returns a warning, with advice, if the learning rate was not chosen for the total batch size; else ""."""
    batch = total_batch_size(trainer)
    expected = {"the checkpoint was trained with": before}
    expected |= {"the recipe was published with": settings.published_batch_size}
    others = {words: size for words, size in expected.items() if size not in (None, batch)}
    if not batch or not others or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return ""
    sizes = " and ".join(f"{words} {size}" for words, size in others.items())
    scaled = "scales" if settings.lr_base_batch_size else "does not scale"
    return (
        f"the total batch is {batch} (batch_size x devices x accumulate_grad_batches), {sizes}: results differ. The "
        f"learning rate {scaled} with it: its peak is {schedule.peak:.4g}. Set --data.batch_size and "
        f"--trainer.accumulate_grad_batches to reach the same total"
    )
