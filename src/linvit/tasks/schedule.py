"""The learning rate of a run, from the settings of the task and the length of the data."""

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from linvit.errors import UserError
from linvit.optim import WarmupCosine
from linvit.tasks.total_batch import total_batch


def run_schedule(hp: Mapping[str, Any], trainer: Trainer) -> WarmupCosine:
    """The learning rate over the run that a trainer is about to do.

    Args:
        hp: Settings of the task.
        trainer: Its trainer.

    Raises:
        UserError: If the run has no end, or its length in epochs is needed and unknown.
    """
    steps = trainer.estimated_stepping_batches
    if not math.isfinite(steps):
        raise UserError("the cosine schedule needs an end: set trainer.max_epochs or trainer.max_steps")
    trainer.fit_loop.setup_data()  # only now is the number of batches known
    batches = trainer.num_training_batches if trainer.limit_train_batches else 0
    per_epoch = batches / trainer.accumulate_grad_batches
    if not math.isfinite(per_epoch):
        if hp["warmup_epochs"] or hp["cooldown_epochs"] or hp["lr_interval"] == "epoch":
            raise UserError(
                "epochs of data of unknown length cannot be counted; set --model.warmup_epochs=0, "
                "--model.cooldown_epochs=0 and --model.lr_interval=step"
            )
        per_epoch = steps  # the run as one epoch
    per_epoch = max(math.ceil(per_epoch), 1)
    epochs = steps / per_epoch
    cooldown = 0 if trainer.fast_dev_run else hp["cooldown_epochs"]  # type: ignore[attr-defined]
    if cooldown and cooldown >= epochs:
        raise UserError(
            f"cooldown_epochs ({hp['cooldown_epochs']}) must be less than the run's {epochs:.4g} epochs; "
            f"lower --model.cooldown_epochs or raise --trainer.max_epochs"
        )
    total = epochs - cooldown
    warmup = min(hp["warmup_epochs"], total)
    if warmup and warmup == total and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        rank_zero_warn(
            f"the warm-up of {hp['warmup_epochs']:g} epochs leaves no time for the cosine in a run of {epochs:.4g} "
            f"epochs{f', {cooldown:g} of them cool-down' if cooldown else ''}: it ends after {total:.4g}. Lower "
            f"--model.warmup_epochs or raise --trainer.max_epochs"
        )
    batch = total_batch(trainer) or hp["lr_batch"]  # without training batches nothing is scaled
    scale = 1.0 if hp["lr_batch"] is None else batch / hp["lr_batch"]
    others = scale if hp["lr_scaled"] == "all" else 1.0
    return WarmupCosine(
        peak=hp["lr"] * scale,
        start=hp["warmup_lr"] * others,
        end=hp["min_lr"] * others,
        warmup=warmup,
        total=total,
        steps_per_epoch=per_epoch,
        interval=hp["lr_interval"],
        lag=hp["lr_lag"],
    )
