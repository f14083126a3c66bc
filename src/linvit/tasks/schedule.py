"""The learning-rate schedule of a run and its total batch size, compared with what the learning rate was chosen for."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from linvit.errors import UserError
from linvit.schedules import CosineCycles, Schedule, WarmupCosine, WarmupPoly, WarmupSteps
from linvit.tasks.optimisation import Optimisation


def run_schedule(settings: Optimisation, trainer: Trainer) -> Schedule:
    """The learning-rate schedule of the run that a trainer is about to start."""
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
    cooldown = 0 if trainer.fast_dev_run else settings.cooldown_epochs  # type: ignore[attr-defined]
    if cooldown and cooldown >= epochs:
        raise UserError(
            f"cooldown_epochs ({cooldown}) must be less than the run's {epochs:.4g} epochs; "
            f"lower --model.cooldown_epochs or raise --trainer.max_epochs"
        )
    total = epochs - cooldown
    wanted = settings.warmup_epochs if settings.warmup_steps is None else settings.warmup_steps / per_epoch
    warmup = min(wanted, total)
    if warmup and warmup == total and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        unit, each = ("epochs", 1) if settings.warmup_steps is None else ("steps", per_epoch)
        cool = f", {cooldown * each:g} of them cool-down" if cooldown else ""
        rank_zero_warn(
            f"the warm-up of {wanted * each:.6g} {unit} leaves no time for the decay in a run of {epochs * each:.6g} "
            f"{unit}{cool}: it ends after {total * each:.6g}. Lower --model.warmup_{unit} or train for longer"
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
    return shapes[settings.schedule](
        peak=settings.lr * scale,
        start=settings.warmup_lr * others,
        end=settings.min_lr * others,
        warmup=warmup,
        total=total,
        steps_per_epoch=per_epoch,
        interval=settings.lr_interval,
        delay=settings.lr_delay,
    )


def total_batch_size(trainer: Trainer) -> int:
    """Images per optimiser step: over all devices, accumulation included; 0 for a run without training batches."""
    trainer.fit_loop.setup_data()
    loader = cast("DataLoader[Any] | None", trainer.train_dataloader)
    if loader is None:
        return 0
    batch: int = loader.batch_size or loader.batch_sampler.batch_size  # type: ignore[union-attr]
    return batch * trainer.world_size * trainer.accumulate_grad_batches


def batch_size_warning(settings: Optimisation, trainer: Trainer, schedule: Schedule, before: int | None) -> str:
    """A warning about a total batch size that the learning rate was not chosen for, with the way out; "" for none."""
    batch = total_batch_size(trainer)
    if not batch or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return ""
    published = settings.published_batch_size
    expected = {"the checkpoint was trained with": before, "the recipe was published with": published}
    others = {words: size for words, size in expected.items() if size not in (None, batch)}
    if not others:
        return ""
    sizes = " and ".join(f"{words} {size}" for words, size in others.items())
    scaled = f"scales with it: its peak is {schedule.peak:.4g}"
    kept = f"does not scale with it: {settings.lr:.4g} is meant for {published or before}"
    wanted, at_once = next(iter(others.values())), batch // trainer.accumulate_grad_batches
    way = f"--trainer.accumulate_grad_batches={wanted // at_once} makes"
    if wanted % at_once:
        way = f"A --data.batch_size that divides {wanted} and --trainer.accumulate_grad_batches make"
    return (
        f"the total batch is {batch} (batch_size x devices x accumulate_grad_batches), {sizes}: results differ. "
        f"The learning rate {scaled if settings.lr_base_batch_size else kept}. {way} the total batch {wanted}"
    )
