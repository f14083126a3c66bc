"""A stream of samples, split over ranks and loader processes.

Where files contain their number of rows (parquet, arrow, save_to_disk), the rows of an epoch are dealt out in whole
batches: each process reads a range of its own, ranges do not overlap, and together they are the epoch, whatever the
numbers of shards, ranks and processes. `split_dataset_by_node` deals whole shards, which differ in length, or lets
every rank read everything. Where files do not (tar, JSON), whole shards are dealt out as it does.

Training: every rank does floor(total / (ranks x batch)) batches; what is over is left out of that epoch, another part
of the data each time. A process whose rows run out early, because images are skipped or shards are short, begins them
again. Evaluation: every row once; ranks may differ by one row.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from linvit.data.loading.seeds import sample_seeds
from linvit.data.sources.bad_images import BadImages
from linvit.data.sources.images import Sample, SampleReader
from linvit.data.sources.read import BadImageError
from linvit.data.sources.shards import ROWS, Part, Shards, assign, permutation, whole, worker_batches
from linvit.data.sources.stream_checks import check_consumers, total_of
from linvit.errors import UserError

READ = 64  # rows that are taken from the stream at once


class Stream(IterableDataset[Sample]):
    """Samples of one split as they are streamed.

    The order is a function of (seed, epoch, ranks, loader processes); the augmentation of a sample of (seed, epoch,
    row), as without streaming.

    Args:
        shards: The split.
        reader: What makes a sample of a row.
        batch_size: Samples per step and rank.
        num_workers: Loader processes of each rank.
        rank: This process.
        world_size: Ranks.
        bad: What becomes of images that cannot be decoded.
        source: The data source, for messages.
        seed: Of training; None is evaluation: in order, every row once.
        buffer: Rows that each loader process holds to choose from at random, as undecoded files.
        total: Rows of the split, where the files do not contain it.
    """

    def __init__(
        self,
        shards: Shards,
        reader: SampleReader,
        batch_size: int,
        num_workers: int,
        rank: int,
        world_size: int,
        bad: BadImages,
        source: str,
        seed: int | None = None,
        buffer: int = 1,
        total: int | None = None,
    ) -> None:
        self.workers = max(num_workers, 1)
        check_consumers(shards, world_size, self.workers, seed is not None, source)
        self.shards = shards
        self.rows = reader.columns_of(shards.rows)
        self.reader = reader
        self.batch_size = batch_size
        self.rank = rank
        self.world_size = world_size
        self.bad = bad
        self.source = source
        self.seed = seed
        self.buffer = buffer
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # loader processes live longer than an epoch
        self.length: int | None = None
        if seed is not None:
            rows = total_of(shards, total, source)
            bad.start(rows)
            per_rank = rows // world_size
            self.length = per_rank // batch_size * batch_size or per_rank
        elif shards.counts is not None:
            rows = sum(shards.counts)
            self.length = (rank + 1) * rows // world_size - rank * rows // world_size

    def __len__(self) -> int:
        """Samples of this rank in an epoch."""
        if self.length is None:
            raise TypeError("the files do not say how many rows they have")
        return self.length

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, in this process and its loader processes."""
        self.epoch.fill_(epoch)

    def __iter__(self) -> Iterator[Sample]:
        """Yields the samples of this loader process."""
        epoch = int(self.epoch)
        worker = get_worker_info()
        parts, wanted = self._mine(epoch, 0 if worker is None else worker.id)
        if self.seed is None:
            yield from self._samples(parts, epoch)
            return
        given = 0
        while given < wanted:
            before = given
            for sample in self._samples(parts, epoch):
                yield sample
                given += 1
                if given == wanted:
                    return
            if given == before:
                raise UserError(f"data source '{self.source}' gave a loader process no image that can be used")

    def _mine(self, epoch: int, worker: int) -> tuple[list[Part], int]:
        """Returns what a loader process reads, and how many samples it gives."""
        seed = None if self.seed is None else (self.seed, epoch)
        order = permutation(self.shards.rows.num_shards, seed)
        first = last = 0
        if self.length is not None:
            first, last = worker_batches(-(-self.length // self.batch_size), worker, self.workers)
            first, last = min(first * self.batch_size, self.length), min(last * self.batch_size, self.length)
        if self.shards.counts is None:
            consumer = self.rank * self.workers + worker
            return whole(order, consumer, self.world_size * self.workers), last - first
        rows = sum(self.shards.counts)
        begin = self.rank * rows // self.world_size if seed is None else self.rank * len(self)
        return assign(self.shards, order, begin + first, begin + last), last - first

    def _samples(self, parts: list[Part], epoch: int) -> Iterator[Sample]:
        """Yields samples; images that cannot be decoded end the run or are left out, as `bad` says."""
        for number, row in self._shuffled(self._rows(parts), epoch, parts):
            counted = self.shards.counts is not None
            place = f"row {number}" if counted else f"row {number % ROWS} of shard {number // ROWS}"
            seed = 0 if self.seed is None else int(sample_seeds(np.array([number]), self.seed, epoch)[0])
            try:
                sample = self.reader(row, number, place, seed)
            except BadImageError as error:
                self.bad.record(error, number)
                continue
            yield sample

    def _rows(self, parts: list[Part]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields undecoded rows with their numbers in the split."""
        for part in parts:
            stream = self.rows.shard(num_shards=self.rows.num_shards, index=part.shard)
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

    def _shuffled(
        self, rows: Iterator[tuple[int, dict[str, Any]]], epoch: int, parts: list[Part]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the rows through a buffer, in which each takes the place of a random other one."""
        if self.seed is None or not parts:
            yield from rows
            return
        rng = np.random.default_rng([self.seed, epoch, parts[0].first])
        held: list[tuple[int, dict[str, Any]]] = []
        for row in rows:
            if len(held) < self.buffer:
                held.append(row)
                continue
            place = int(rng.integers(self.buffer))
            yield held[place]
            held[place] = row
        rng.shuffle(held)
        yield from held
