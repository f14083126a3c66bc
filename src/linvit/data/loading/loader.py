"""The loader that makes batches of a data set."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from linvit.data.loading.position import Layout, Phase, Position, resumed
from linvit.machine import let_open
from linvit.signals import outlive_signals


class Order(Protocol):
    """What decides the order of training samples: a `TrainSampler`, or a stream."""

    epoch: Any
    layout: Layout
    position: Position | None

    @property
    def identity(self) -> dict[str, int]:
        """What the order follows from, besides the epoch and the layout."""

    @property
    def batches_done(self) -> int:
        """Batches of the current epoch that had their turn before this process resumed it."""

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""


class TrainLoader(DataLoader[Any]):
    """Batches of training samples, which can go on in the middle of an epoch. Skipped samples are not loaded.

    A pass starts when its first batch is asked for. Lightning makes the iterator before it sets the epoch, and a loader
    that started its processes then would have them load the first batches of epoch 0.
    """

    _passed: tuple[int, tuple[Phase, ...], int] | None = None  # epoch, phases before, batches of this one

    @property
    def order(self) -> Order | None:
        """What decides the order; None if it cannot be resumed, as with `trainer.overfit_batches`."""
        order = self.dataset if isinstance(self.dataset, IterableDataset) else self.sampler
        return cast("Order", order) if hasattr(order, "position") else None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yields the batches of the epoch, or what is left of one that is resumed, and counts them."""
        order = self.order
        if order is None:
            yield from super().__iter__()
            return
        epoch = int(order.epoch)
        before, done = resumed(order.position, epoch, order.layout)
        for batch in super().__iter__():
            done += 1
            self._passed = epoch, before, done
            yield batch

    @property
    def batches_done(self) -> int:
        """Batches of the current epoch that had their turn before this process resumed it, in the present layout."""
        return 0 if self.order is None else self.order.batches_done

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch has come, as plain numbers: batches that were handed out, not those that are prefetched."""
        if self.order is None:
            return {}
        position = self.order.position
        if self._passed is not None:
            epoch, before, done = self._passed
            position = Position(epoch, (*before, Phase(self.order.layout, done)))
        if position is None:
            return {}
        return {"epoch": position.epoch, "phases": position.plain(), "order": self.order.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next pass go on where another loader was. Of other data, or in another order, it starts anew."""
        if self.order is None or not state:
            return
        was, now = state["order"], self.order.identity
        if was != now:
            names = [name for name in sorted({*was, *now}) if was.get(name) != now.get(name)]
            differs = ", ".join(f"{name} was {was.get(name)} and is {now.get(name)}" for name in names)
            rank_zero_warn(f"the epoch of the checkpoint starts anew, since its order has changed: {differs}")
            state = {**state, "phases": []}
        self.order.position = Position.read(state["epoch"], state["phases"])
        self.order.set_epoch(state["epoch"])
        self._passed = None

    def end_epoch(self) -> None:
        """Leaves out the rest of the epoch that was loaded."""
        if self.order is not None and self.order.position is not None:
            epoch, phases = self.order.position
            self.order.position = Position(epoch, (*phases, Phase(self.order.layout, len(self))))


def make_loader(
    samples: Dataset[Any],
    batch_size: int,
    num_workers: int,
    collate: Callable[[Sequence[Any]], Any],
    sampler: Sampler[Any] | None = None,
    training: bool = False,
) -> DataLoader[Any]:
    """Makes a loader that leaves torch's global random generator alone and keeps its processes from epoch to epoch.

    Args:
        samples: A data set with a sampler, or a stream, which must have `set_epoch`.
        batch_size: Samples per batch.
        num_workers: Loader processes; 0 loads in this process.
        collate: Samples to a batch.
        sampler: The order of a data set that is not a stream.
        training: Whether passes can be resumed.

    Raises:
        UserError: If this process may not open as many files as so many loader processes need.
    """
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
        worker_init_fn=outlive_signals,
        pin_memory=torch.cuda.is_available(),
    )
    if isinstance(loader, TrainLoader) and loader.order is not None:
        loader.order.position = None  # a stream may have been resumed with another loader
    if isinstance(samples, IterableDataset):  # Lightning sets the epoch through the sampler
        loader.sampler.set_epoch = samples.set_epoch  # type: ignore[attr-defined]
    return loader
