"""The learning rate of a run, from the settings of the task and the length of the data."""

import math
from collections.abc import Mapping
from typing import Any, cast

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader

from linvit.errors import UserError
from linvit.optim import WarmupCosine


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
    if hp["warmup_epochs"] > epochs:
        rank_zero_warn(
            f"the warm-up of {hp['warmup_epochs']} epochs is longer than the run ({epochs:.4g} epochs); it is cut "
            f"to the run. Lower --model.warmup_epochs"
        )
    cooldown = 0 if trainer.fast_dev_run else hp["cooldown_epochs"]  # type: ignore[attr-defined]
    if cooldown and cooldown >= epochs:
        raise UserError(
            f"cooldown_epochs ({hp['cooldown_epochs']}) must be less than the run's {epochs:.4g} epochs; "
            f"lower --model.cooldown_epochs or raise --trainer.max_epochs"
        )
    batch = total_batch(trainer) or hp["lr_batch"]  # without training batches nothing is scaled
    scale = 1.0 if hp["lr_batch"] is None else batch / hp["lr_batch"]
    others = scale if hp["lr_scaled"] == "all" else 1.0
    return WarmupCosine(
        peak=hp["lr"] * scale,
        start=hp["warmup_lr"] * others,
        end=hp["min_lr"] * others,
        warmup=min(hp["warmup_epochs"], epochs),
        total=epochs - cooldown,
        steps_per_epoch=per_epoch,
        interval=hp["lr_interval"],
        lag=hp["lr_lag"],
    )


def total_batch(trainer: Trainer) -> int:
    """Images per optimiser step: over all devices, accumulation included; 0 for a run without training batches."""
    trainer.fit_loop.setup_data()
    loader = cast("DataLoader[Any] | None", trainer.train_dataloader)
    if loader is None:
        return 0
    batch: int = loader.batch_size or loader.batch_sampler.batch_size  # type: ignore[union-attr]
    return batch * trainer.world_size * trainer.accumulate_grad_batches
