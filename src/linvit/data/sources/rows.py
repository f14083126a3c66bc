"""The undecoded rows of a stream: in order, or shuffled and from any place on."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import Any, NamedTuple, TypeVar

import datasets
import numpy as np

from linvit.data.sources.shards import Part
from linvit.data.sources.splits import readable_source

T = TypeVar("T")
Row = tuple[int, dict[str, Any]]  # its number in the split, and its cells by column
READ = 64  # rows that are taken from the stream at once
DRAWN = 1024  # random numbers that are drawn at once


class StreamRows(NamedTuple):
    """The rows of a split, in arrow format, of which `buffer` are held to choose from at random.

    They are `counted` if the files contain their number of rows, so that the parts have an end.
    """

    stream: datasets.IterableDataset
    counted: bool
    buffer: int
    source: str

    def read(self, parts: Iterable[Part]) -> Iterator[Row]:
        """Yields the rows of the parts."""
        with readable_source(self.source):
            yield from self._read(parts)

    def _read(self, parts: Iterable[Part]) -> Iterator[Row]:
        for part in parts:
            stream = self.stream.shard(num_shards=self.stream.num_shards, index=part.shard)
            number = part.first
            left = None if part.stop is None else part.stop - part.start
            for table in (stream.skip(part.start) if part.start else stream).iter(READ):  # not split by loader process
                for row in (table if left is None else table.slice(0, left)).to_pylist():
                    yield number, row
                    number += 1
                if left is not None:
                    left -= min(left, len(table))
                    if left == 0:
                        break

    def passes(self, parts: list[Part], start: int, seed: Sequence[int]) -> Iterator[Iterator[Row]]:
        """Yields the shuffled rows of some parts from a place on, and then all of them again and again."""
        seed = (*seed, parts[0].first)
        if self.counted:
            rows = sum((part.stop or 0) - part.start for part in parts)
            order = np.fromiter(shuffled(range(rows), self.buffer, seed), np.int64, rows)
            yield self._chosen(parts, order[start:])
            while True:
                yield self._chosen(parts, order)
        skip = start
        while True:
            again = shuffled(self.read(parts), self.buffer, seed)
            skip -= sum(1 for _ in islice(again, skip))
            if not skip:  # otherwise it is in a later pass that it starts
                yield again

    def _chosen(self, parts: list[Part], order: np.ndarray) -> Iterator[Row]:
        """Yields the rows at some places of the parts in the given order. The first place is where reading starts."""
        first, wanted = int(order.min()), set(order.tolist())
        rows = enumerate(self.read(from_row(parts, first)), first)
        buffered: dict[int, Row] = {}
        for place in order.tolist():
            while place not in buffered:
                at, row = next(rows)
                if at in wanted:
                    buffered[at] = row
            yield buffered.pop(place)


def from_row(parts: Iterable[Part], first: int) -> list[Part]:
    """Parts of known length without their first rows."""
    pieces = []
    for part in parts:
        rows = (part.stop or 0) - part.start
        if first < rows:
            pieces.append(part._replace(start=part.start + first, first=part.first + first))
        first = max(first - rows, 0)
    return pieces


def shuffled(items: Iterable[T], buffer: int, seed: Sequence[int]) -> Iterator[T]:
    """Yields items through a buffer, in which each takes the place of a random other one."""
    rng = np.random.default_rng(list(seed))
    places = chain.from_iterable(rng.integers(buffer, size=DRAWN).tolist() for _ in count())
    buffered: list[T] = []
    for item in items:
        if len(buffered) < buffer:
            buffered.append(item)
            continue
        place = next(places)
        yield buffered[place]
        buffered[place] = item
    rng.shuffle(buffered)
    yield from buffered
