"""Who reads which rows of a training stream in an epoch, also after a change of the ranks or loader processes in it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from linvit.data.loading.position import Layout, Phase
from linvit.data.sources.shards import Part, Shards, assign, whole, worker_batches


class Lane(NamedTuple):
    """Samples `start` to `stop` of what a loader process gives that reads the parts and shuffles them."""

    parts: list[Part]
    start: int
    stop: int


class Epoch(NamedTuple):
    """An epoch of a training stream.

    Attributes:
        shards: The split.
        order: Of its shards.
        total: Rows of the split.
    """

    shards: Shards
    order: np.ndarray
    total: int

    def deal(self, before: Sequence[Phase], layout: Layout, rank: int, worker: int) -> list[Lane]:
        """What a loader process gives: its share of the rows, or of what the phases before have left of the epoch."""
        lanes = self.left(before) if before else []
        share = layout.rest(length(lanes), self.total) if before else layout.samples(self.total)
        begin, end = rank * share // layout.ranks, (rank + 1) * share // layout.ranks
        size = layout.batch_size
        first, last = (begin + size * b for b in worker_batches(-(-(end - begin) // size), worker, layout.workers))
        first, last = min(first, end), min(last, end)
        if before:
            return cut(lanes, first, last)
        if self.shards.counts is None:
            consumer = rank * layout.workers + worker
            parts = whole(self.order, consumer, layout.ranks * layout.workers)
        else:
            parts = assign(self.shards, self.order, first, last)
        return [Lane(parts, 0, last - first)]

    def left(self, phases: Sequence[Phase]) -> list[Lane]:
        """What is left of the epoch after some phases."""
        *before, (layout, batches) = phases
        lanes = []
        for rank in range(layout.ranks):
            for worker in range(layout.workers):
                lanes += cut(self.deal(before, layout, rank, worker), given(layout, worker, batches))
        return lanes


def given(layout: Layout, worker: int, batches: int) -> int:
    """How many samples a loader process gave for so many batches of its rank: the loader takes them in turn."""
    return len(range(worker, batches, layout.workers)) * layout.batch_size


def length(lanes: Iterable[Lane]) -> int:
    """The samples of lanes."""
    return sum(lane.stop - lane.start for lane in lanes)


def cut(lanes: Iterable[Lane], start: int, stop: int | None = None) -> list[Lane]:
    """Samples `start` to `stop` of lanes that follow each other; None is their end."""
    pieces = []
    for parts, first, last in lanes:
        here = last - first
        low, high = max(start, 0), here if stop is None else min(stop, here)
        if low < high:
            pieces.append(Lane(parts, first + low, first + high))
        start, stop = start - here, None if stop is None else stop - here
    return pieces
