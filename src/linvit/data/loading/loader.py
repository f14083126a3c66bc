"""The loader that makes batches of a data set."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import Queue
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from linvit.data.loading.sampler import EpochProgress, TrainOrder
from linvit.errors import find_user_error
from linvit.io.machine import let_open
from linvit.io.signals import ignore_stop_signals


class TrainLoader(DataLoader[Any]):
    """Batches of training samples, resumable in the middle of an epoch, and the seconds spent waiting for them.

    A pass starts when its first batch is asked for: Lightning makes the iterator before it sets the epoch.
    """

    seconds_waited = 0.0
    _passed: EpochProgress | None = None

    @property
    def order(self) -> TrainOrder | None:
        """Sampler or dataset that determines the order; None if the order cannot be resumed (`overfit_batches`)."""
        order = self.dataset if isinstance(self.dataset, IterableDataset) else self.sampler
        return order if isinstance(order, TrainOrder) else None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yields and counts the batches of the epoch, or the remaining batches of a resumed epoch."""
        order, batches, end = self.order, super().__iter__(), object()
        epoch, samples = (0, 0) if order is None else (int(order.epoch), order.samples_done)
        while True:
            started = time.perf_counter()
            batch = next(batches, end)
            self.seconds_waited += time.perf_counter() - started
            if batch is end:
                return
            if order is not None:
                samples += order.topology.step
                self._passed = EpochProgress(epoch, samples)
            yield batch

    @property
    def batches_done(self) -> int:
        """Batches of the current epoch that were trained on before this process resumed it."""
        return 0 if self.order is None else self.order.batches_done

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of the epoch as plain numbers; counts yielded batches, not prefetched ones."""
        progress = None if self.order is None else self._passed or self.order.progress
        if self.order is None or progress is None:
            return {}
        return {**progress._asdict(), "order": self.order.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next pass resume where another loader stopped; if data or order differ, the epoch starts again."""
        if self.order is None or not state:
            return
        before, now, samples = state["order"], self.order.identity, state["samples"]
        if before != now:
            names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
            differs = ", ".join(f"{name} was {before.get(name)} and is {now.get(name)}" for name in names)
            rank_zero_warn(f"the epoch of the checkpoint starts again, since its order has changed: {differs}")
            samples = 0
        self.order.progress = EpochProgress(state["epoch"], samples)
        self.order.set_epoch(state["epoch"])
        self._passed = None

    def end_epoch(self) -> None:
        """Leaves out the rest of the epoch that was loaded."""
        if self.order is not None and self.order.progress is not None:
            self.order.progress = self.order.progress._replace(samples=self.order.total)


def prepare_worker(worker: int) -> None:
    """Prepares a loader process: it ignores signals, and ends if it cannot send a batch.

    Python prints only the traceback then, and the run would wait for that batch for ever.
    """
    ignore_stop_signals(worker)
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # type: ignore[attr-defined]


def _end_worker(error: Exception, batch: Any) -> None:
    os.write(2, f"\nlinvit: error: a loader process cannot send a batch: {find_user_error(error) or error}\n".encode())
    os._exit(1)


def make_loader(
    samples: Dataset[Any],
    batch_size: int,
    num_workers: int,
    collate: Callable[[Sequence[Any]], Any],
    sampler: Sampler[Any] | None = None,
    training: bool = False,
) -> DataLoader[Any]:
    """Makes a loader that leaves torch's global generator alone and keeps its processes; one of training resumes."""
    if num_workers:
        let_open(64 + 16 * num_workers, f"{num_workers} loader processes", "lower --data.num_workers, or")
    loader = (TrainLoader if training else DataLoader)(
        samples,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        collate_fn=collate,
        generator=torch.Generator(),  # without one it would draw from torch's global generator
        persistent_workers=num_workers > 0,
        worker_init_fn=prepare_worker,
        pin_memory=torch.cuda.is_available(),
    )
    if isinstance(loader, TrainLoader) and loader.order is not None:
        loader.order.progress = None  # a stream may have been resumed with another loader
    if isinstance(samples, IterableDataset):  # Lightning sets the epoch through the sampler
        loader.sampler.set_epoch = samples.set_epoch  # type: ignore[attr-defined]
    return loader
