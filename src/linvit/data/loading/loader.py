"""The loader that makes batches of a data set."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from linvit.signals import outlive_signals


def make_loader(
    samples: Dataset[Any],
    batch_size: int,
    num_workers: int,
    collate: Callable[[Sequence[Any]], Any],
    sampler: Sampler[Any] | None = None,
) -> DataLoader[Any]:
    """Makes a loader that leaves torch's global random generator alone and keeps its processes from epoch to epoch.

    Args:
        samples: A data set with a sampler, or a stream, which must have `set_epoch`.
        batch_size: Samples per batch.
        num_workers: Loader processes; 0 loads in this process.
        collate: Samples to a batch.
        sampler: The order of a data set that is not a stream.
    """
    loader = DataLoader(
        samples,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        generator=torch.Generator(),  # without one it would draw from torch's global generator
        persistent_workers=num_workers > 0,
        worker_init_fn=outlive_signals,
        pin_memory=torch.cuda.is_available(),
    )
    if isinstance(samples, IterableDataset):  # Lightning sets the epoch through the sampler
        loader.sampler.set_epoch = samples.set_epoch  # type: ignore[attr-defined]
    return loader
