"""The total batch size of a run: counted, and compared with the one that the learning rate was chosen for."""

from typing import Any, cast

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from linvit.schedules import Schedule
from linvit.tasks.optimisation import Optimisation


def total_batch_size(trainer: Trainer) -> int:
    """Images per optimiser step: over all devices, accumulation included; 0 for a run without training batches."""
    trainer.fit_loop.setup_data()
    loader = cast("DataLoader[Any] | None", trainer.train_dataloader)
    if loader is None:
        return 0
    batch: int = loader.batch_size or loader.batch_sampler.batch_size  # type: ignore[union-attr]
    return batch * trainer.world_size * trainer.accumulate_grad_batches


def batch_size_warning(settings: Optimisation, trainer: Trainer, schedule: Schedule, before: int | None) -> str:
    """A warning about a total batch size that the learning rate was not chosen for, with the way out; "" for none.

    Args:
        settings: Those of the task.
        trainer: The trainer of the run that is about to start.
        schedule: The learning-rate schedule of the run.
        before: Total batch size of the run that is resumed, if known.
    """
    batch = total_batch_size(trainer)
    if not batch or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return ""
    published = settings.published_batch_size
    expected = {"the checkpoint was trained with": before, "the recipe was published with": published}
    others = {words: size for words, size in expected.items() if size not in (None, batch)}
    sentences = _ends_above_peak(schedule)
    if others:
        sizes = " and ".join(f"{words} {size}" for words, size in others.items())
        scaled = f"scales with it: its peak is {schedule.peak:.4g}"
        kept = f"does not scale with it: {settings.lr:.4g} is meant for {published or before}"
        sentences = [
            f"the total batch is {batch} (batch_size x devices x accumulate_grad_batches), {sizes}: results differ",
            f"The learning rate {scaled if settings.lr_base_batch_size else kept}",
            *sentences,
        ]
    if sentences:
        sentences.append(_way_out(trainer, batch, next(iter(others.values()), settings.lr_base_batch_size)))
    return ". ".join(sentences)


def _ends_above_peak(schedule: Schedule) -> list[str]:
    """A sentence for each end of the schedule that lies above its peak."""
    ends = {"warmup_lr": (schedule.start, "falls in the warm-up"), "min_lr": (schedule.end, "rises after the warm-up")}
    if not schedule.warmup:
        del ends["warmup_lr"]
    return [
        f"{name} ({lr:.4g}) is above the peak learning rate ({schedule.peak:.4g}), so that the rate {change}"
        for name, (lr, change) in ends.items()
        if lr > schedule.peak
    ]


def _way_out(trainer: Trainer, batch: int, wanted: int | None) -> str:
    """The options that bring the total batch size to `wanted`; if it has that size, those that lower the ends."""
    if wanted in (None, batch):
        return "Lower --model.warmup_lr and --model.min_lr, or raise --model.lr"
    at_once = batch // trainer.accumulate_grad_batches
    if wanted % at_once == 0:
        return f"--trainer.accumulate_grad_batches={wanted // at_once} makes the total batch {wanted}"
    return (
        f"A --data.batch_size that divides {wanted} and --trainer.accumulate_grad_batches make the total batch {wanted}"
    )
