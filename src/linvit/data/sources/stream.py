"""A stream of samples, which `datasets` reads, shuffles and splits; each loader process of each rank is a node.

Nodes read whole shards, or every n-th row where shards are fewer than nodes. In training every rank does
floor(total / (ranks x batch)) batches, and a node whose rows run out early begins them again. The n-th sample of a
node has its n-th row after shuffling, or the next one with a usable image. So an epoch is resumed exactly in the same
numbers of ranks, loader processes and samples per batch, by the same version of `datasets`; else it starts again. To
resume, earlier rows are read but not decoded: `IterableDataset.state_dict` does not keep those of the shuffle buffer.
"""

import math
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import datasets
import fsspec
import numpy as np
import pyarrow.parquet
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset, get_worker_info

from linvit.data.loading.sampler import TrainOrder, WorkerTopology, sample_seeds
from linvit.data.sources.images import Sample, SampleReader
from linvit.data.sources.read import BadImageError, BadImages
from linvit.data.sources.splits import arrow_batches, find_source, named, readable_source
from linvit.errors import UserError

FEW = 128  # with fewer files, each row group is a shard, which shuffles better
READ = 64  # rows that are taken from the stream at once


class Shards(NamedTuple):
    """One split of a stream, and the number of its rows; None where nothing says it."""

    rows: datasets.IterableDataset
    total: int | None


def load_streams(source: str) -> dict[str, Shards]:
    """Returns the splits of a data source as streams, under the names train, val and test; see `load_splits`."""
    with readable_source(source):
        kind, place = find_source(source)
        if kind in (None, "saved"):
            raise UserError(
                f"cannot stream '{source}': expected parquet, arrow or tar files. Images in folders and saved sets "
                f"are read one by one anyway; leave out --data.streaming"
            )
        builder = datasets.load_dataset_builder(kind, **place)
        streams = named(dict(builder.as_streaming_dataset()), source)
        return {name: _counted(rows, builder) for name, rows in streams.items()}


def _counted(rows: datasets.IterableDataset, builder: datasets.DatasetBuilder) -> Shards:
    """Adds the number of rows: parquet and arrow files contain it, at their ends or in their headers."""
    files = [str(file) for file in (builder.config.data_files or {}).get(rows.split, [])]
    for ending, count in ((".parquet", _parquet_count), (".arrow", _arrow_count)):
        if files and all(file.endswith(ending) for file in files):
            with ThreadPoolExecutor(16) as pool:
                total = sum(pool.map(count, files))
            return Shards(rows.reshard() if ending == ".parquet" and len(files) < FEW else rows, total)
    info = (builder.info.splits or {}).get(rows.split)
    return Shards(rows, info.num_examples if info is not None and info.num_examples else None)


def _parquet_count(file: str) -> int:
    with fsspec.open(file, "rb") as stream:  # of a file on the hub only its end is read
        return int(pyarrow.parquet.read_metadata(stream).num_rows)


def _arrow_count(file: str) -> int:
    with pyarrow.memory_map(file) as stream:
        return sum(batch.num_rows for batch in arrow_batches(stream))


@dataclass(eq=False)
class Stream(TrainOrder, IterableDataset[Sample]):
    """Samples of one split as a stream. Without a seed: for evaluation, in order, every row once.

    The order is a function of (seed, epoch, ranks, loader processes); the augmentation of a sample of (seed, epoch,
    image).
    """

    shards: Shards
    reader: SampleReader
    batch_size: int
    num_workers: int
    rank: int
    world_size: int
    bad: BadImages
    source: str
    seed: int | None = None
    buffer: int = 1
    given_total: int | None = None

    def __post_init__(self) -> None:
        known, given = self.shards.total, self.given_total
        self.topology = WorkerTopology(self.world_size, max(self.num_workers, 1), self.batch_size)
        self.rows = self.reader.columns_of(self.shards.rows)
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # loader processes live longer than an epoch
        if self.seed is not None:
            if known is None and given is None:
                raise UserError(f"nothing says how many rows '{self.source}' trains on; set --data.streaming_rows")
            if given is not None and known is not None and given > known:
                raise UserError(f"--data.streaming_rows={given}, but '{self.source}' has {known}; leave it out")
            self.total = given or known or 0
            self.bad.start(self.total)
            # of one shard at a time: with several, threads read ahead, for which each pass sleeps 5 seconds at its end
            self.rows = self.rows.shuffle(self.seed, buffer_size=self.buffer, max_buffer_input_shards=1)

    def __len__(self) -> int:
        """Samples of this rank in an epoch of training."""
        if self.seed is None:
            raise TypeError("how many rows of a stream a rank evaluates is not known")
        return self.topology.epoch_samples(self.total) // self.world_size

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, in this process and its loader processes."""
        self.epoch.fill_(epoch)

    @property
    def identity(self) -> dict[str, int | str]:
        """Values that determine the order of training besides the epoch."""
        order = {"samples": self.total, "shards": self.rows.num_shards, "shuffle_buffer": self.buffer}
        return {**order, "seed": self.seed or 0, "datasets": datasets.__version__, **self.topology._asdict()}

    def __iter__(self) -> Iterator[Sample]:
        """Yields the samples of this loader process; after a resume, the remaining ones."""
        info, (ranks, workers, size) = get_worker_info(), self.topology
        training, skipped, left, seeds = self.seed is not None, 0, math.inf, list[int]()
        worker = 0 if info is None else info.id
        if training:
            done = self.batches_done
            worker = (worker + done) % workers  # the loader starts with process 0
            batches = worker_batches(-(-len(self) // size), worker, workers)
            first, last = (min(size * batch, len(self)) for batch in batches)
            skipped = size * len(range(worker, done, workers))  # it takes batches from each in turn
            left = last - first - skipped
        while left > 0:
            found, before = False, skipped
            for place, row in enumerate(self._rows(worker)):
                if skipped:
                    skipped -= 1
                    continue
                name = fingerprint(row[self.reader.image])
                number = name if training else (place * ranks + self.rank) * workers + worker
                seeds.append(
                    0 if self.seed is None else int(sample_seeds(np.array([name]), self.seed, int(self.epoch))[0])
                )
                try:
                    samples = [self.reader(row, number, f"of CRC-32 {name:08x}", seed) for seed in seeds]
                except BadImageError as error:
                    self.bad.record(error)
                    continue
                yield from samples[: int(min(left, len(samples)))]
                left, found = left - len(samples), True
                seeds.clear()
                if left <= 0:
                    return
            if not training:
                return
            if not found and skipped == before:
                raise UserError(f"data source '{self.source}' gave a loader process no image that can be used")

    def _rows(self, worker: int) -> Iterator[dict[str, Any]]:
        """Yields the rows of a loader process in the current epoch, undecoded."""
        ranks, workers, _ = self.topology
        strategy: Any = "shards" if self.rows.num_shards >= ranks * workers else "examples"
        with readable_source(self.source):
            rows = split_dataset_by_node(self.rows, self.rank * workers + worker, ranks * workers, strategy)
            rows.set_epoch(int(self.epoch))
            for table in rows.iter(READ):  # which is not split by loader process
                yield from table.to_pylist()


def fingerprint(stored: dict[str, Any] | None) -> int:
    """Returns the CRC-32 of an undecoded image and its path: rows of a shuffled stream have no numbers."""
    stored = stored or {}
    return zlib.crc32(stored.get("bytes") or b"", zlib.crc32(str(stored.get("path")).encode()))


def worker_batches(batches: int, worker: int, workers: int) -> tuple[int, int]:
    """Returns the first batch of a loader process and the one after its last; processes differ by one batch at most."""
    each, more = divmod(batches, workers)
    first = worker * each + min(worker, more)
    return first, first + each + (worker < more)
