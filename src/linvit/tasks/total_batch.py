"""The images per optimiser step: counted, and held against those that the learning rate is meant for."""

from collections.abc import Mapping
from typing import Any, cast

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from linvit.optim import WarmupCosine


def total_batch(trainer: Trainer) -> int:
    """Images per optimiser step: over all devices, accumulation included; 0 for a run without training batches."""
    trainer.fit_loop.setup_data()
    loader = cast("DataLoader[Any] | None", trainer.train_dataloader)
    if loader is None:
        return 0
    batch: int = loader.batch_size or loader.batch_sampler.batch_size  # type: ignore[union-attr]
    return batch * trainer.world_size * trainer.accumulate_grad_batches


def batch_warning(hp: Mapping[str, Any], trainer: Trainer, schedule: WarmupCosine, before: int | None) -> str:
    """What is to be told of a total batch for which the learning rate is not meant, and the way out; "" if nothing is.

    Args:
        hp: Settings of the task.
        trainer: Of the run that is about to start.
        schedule: Its learning rate.
        before: Total batch of the run that it continues, if known.
    """
    batch = total_batch(trainer)
    if not batch or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return ""
    meant = {"the checkpoint was trained with": before, "the recipe was published with": hp["published_batch"]}
    others = {words: size for words, size in meant.items() if size not in (None, batch)}
    told = _reversals(schedule)
    if others:
        sizes = " and ".join(f"{words} {size}" for words, size in others.items())
        kept = f"does not scale with it: {hp['lr']:.4g} is meant for {hp['published_batch'] or before}"
        told = [
            f"the total batch is {batch} (batch_size x devices x accumulate_grad_batches), {sizes}: results differ",
            f"The learning rate {f'scales with it: its peak is {schedule.peak:.4g}' if hp['lr_batch'] else kept}",
            *told,
        ]
    if told:
        told.append(_way_out(trainer, batch, next(iter(others.values()), hp["lr_batch"])))
    return ". ".join(told)


def _reversals(schedule: WarmupCosine) -> list[str]:
    """Ends of the schedule that lie above its peak."""
    ends = {"warmup_lr": (schedule.start, "falls in the warm-up"), "min_lr": (schedule.end, "rises after the warm-up")}
    if not schedule.warmup:
        del ends["warmup_lr"]
    return [
        f"{name} ({rate:.4g}) is above the peak learning rate ({schedule.peak:.4g}), so that the rate {turn}"
        for name, (rate, turn) in ends.items()
        if rate > schedule.peak
    ]


def _way_out(trainer: Trainer, batch: int, wanted: int | None) -> str:
    """How the total batch gets to the size that is wanted."""
    if wanted in (None, batch):
        return "Lower --model.warmup_lr and --model.min_lr, or raise --model.lr"
    at_once = batch // trainer.accumulate_grad_batches
    if wanted % at_once == 0:
        return f"--trainer.accumulate_grad_batches={wanted // at_once} makes the total batch {wanted}"
    return (
        f"A --data.batch_size that divides {wanted} and --trainer.accumulate_grad_batches make the total batch {wanted}"
    )
