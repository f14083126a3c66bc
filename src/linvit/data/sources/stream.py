"""A stream of samples, split over ranks and loader processes.

Each process reads whole shards; where these are fewer than processes, each process reads every n-th row of all.

Training: every rank does floor(total / (ranks x batch)) batches. A process whose rows run out early, because images
are skipped or shards are short, begins them again. The n-th sample of a loader process has the n-th row of its share,
after shuffling, or the next one with a usable image. So an epoch continues anywhere in the same numbers of ranks,
loader processes and samples per batch; in others it starts again.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any, NamedTuple, TypeVar

import datasets
import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from torch.utils.data import IterableDataset, get_worker_info

from linvit.data.loading.sampler import TrainOrder, WorkerTopology, sample_seeds
from linvit.data.sources.images import Sample, SampleReader
from linvit.data.sources.read import BadImageError, BadImages
from linvit.data.sources.splits import find_source, named, readable_source
from linvit.errors import UserError

FEW = 128  # files; of fewer, each row group counts as a shard of its own, which shuffles better
ROWS = 2**32  # more than a shard has: numbers its rows
READ = 64  # rows that are taken from the stream at once
DRAWN = 1024  # random numbers that are drawn at once
T = TypeVar("T")


class Shards(NamedTuple):
    """One split of a stream, and the number of its rows; None where nothing says it."""

    rows: datasets.IterableDataset
    total: int | None


def load_streams(source: str) -> dict[str, Shards]:
    """The splits of a data source as streams, under the names train, val and test; see `load_splits`."""
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
    """Adds what the files say about their length: parquet and arrow files do, from their ends or headers."""
    files = [str(file) for file in (builder.config.data_files or {}).get(rows.split, [])]
    for ending, counted in ((".parquet", _parquet_count), (".arrow", _arrow_count)):
        if files and all(file.endswith(ending) for file in files):
            with ThreadPoolExecutor(16) as pool:
                total = sum(pool.map(counted, files))
            return Shards(rows.reshard() if ending == ".parquet" and len(files) < FEW else rows, total)
    info = (builder.info.splits or {}).get(rows.split)
    return Shards(rows, info.num_examples if info is not None and info.num_examples else None)


def _parquet_count(file: str) -> int:
    with fsspec.open(file, "rb") as stream:  # of a file on the hub only its end is read
        return int(pyarrow.parquet.read_metadata(stream).num_rows)


def _arrow_count(file: str) -> int:
    with pyarrow.memory_map(file) as stream:
        try:
            return sum(batch.num_rows for batch in pyarrow.ipc.open_stream(stream))
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(stream)
            return sum(reader.get_batch(index).num_rows for index in range(reader.num_record_batches))


def worker_batches(batches: int, worker: int, workers: int) -> tuple[int, int]:
    """The first batch of a loader process and the one after its last; processes differ by one batch at most."""
    each, more = divmod(batches, workers)
    first = worker * each + min(worker, more)
    return first, first + each + (worker < more)


@dataclass(eq=False)
class Stream(TrainOrder, IterableDataset[Sample]):
    """Samples of one split as they are streamed; without a seed those of evaluation, in order, every row once.

    The order is a function of (seed, epoch, ranks, loader processes); the augmentation of a sample of (seed, epoch,
    row).
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
        shards, total = self.shards, self.given_total
        self.topology = WorkerTopology(self.world_size, max(self.num_workers, 1), self.batch_size)
        self.rows = self.reader.columns_of(shards.rows)
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # loader processes live longer than an epoch
        self.length: int | None = None
        if self.seed is not None:
            if shards.total is None and total is None:
                raise UserError(f"nothing says how many rows '{self.source}' trains on; set --data.streaming_rows")
            if total is not None and shards.total is not None and total > shards.total:
                raise UserError(f"--data.streaming_rows={total}, but '{self.source}' has {shards.total}; leave it out")
            self.total = total or shards.total or 0
            self.bad.start(self.total)
            self.length = self.topology.epoch_samples(self.total) // self.world_size

    def __len__(self) -> int:
        """Samples of this rank in an epoch of training."""
        if self.length is None:
            raise TypeError("how many rows of a stream a rank evaluates is not known")
        return self.length

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass, in this process and its loader processes."""
        self.epoch.fill_(epoch)

    @property
    def identity(self) -> dict[str, int]:
        """What the order of training follows from, besides the epoch."""
        order = {"samples": self.total, "shards": self.shards.rows.num_shards, "shuffle_buffer": self.buffer}
        return order | {"seed": self.seed or 0} | self.topology._asdict()

    def __iter__(self) -> Iterator[Sample]:
        """Yields the samples of this loader process, those that are left of an epoch that is resumed."""
        info = get_worker_info()
        process = 0 if info is None else info.id
        yield from self._in_order(process) if self.seed is None else self._training(process)

    def _rows(self, worker: int, order: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the share of a loader process of the shards in an order, undecoded: numbers, and cells by column."""
        ranks, workers, _ = self.topology
        own, all_of_them = self.rank * workers + worker, ranks * workers
        whole = len(order) >= all_of_them
        rows = (row for shard in (order[own::all_of_them] if whole else order).tolist() for row in self._read(shard))
        return rows if whole else islice(rows, own, None, all_of_them)

    def _in_order(self, worker: int) -> Iterator[Sample]:
        """Yields the share of a loader process in evaluation; an image that cannot be decoded ends the run."""
        for number, row in self._rows(worker, np.arange(self.shards.rows.num_shards)):
            try:
                yield self._sample(number, row, 0)
            except BadImageError as error:
                self.bad.record(error, number)

    def _training(self, process: int) -> Iterator[Sample]:
        """Yields the rest of the share of a loader process in training, each sample with the seed of its own row."""
        seed, done, workers = (self.seed or 0, int(self.epoch)), self.batches_done, self.topology.workers
        worker = (process + done) % workers  # the loader starts with process 0
        size = self.topology.batch_size
        first, last = (min(size * batch, len(self)) for batch in worker_batches(-(-len(self) // size), worker, workers))
        start = size * len(range(worker, done, workers))  # it takes batches from each in turn
        left, seeds = last - first - start, list[int]()
        if left <= 0:
            return
        found = True
        for rows in self._passes(worker, start, seed):
            found, before = False, found
            for number, row in rows:
                seeds.append(int(sample_seeds(np.array([number]), *seed)[0]))
                try:
                    samples = [self._sample(number, row, own) for own in seeds]
                except BadImageError as error:
                    self.bad.record(error, number)
                    continue
                yield from samples[:left]
                left, found = left - len(samples), True
                seeds.clear()
                if left <= 0:
                    return
            if not found and not before:
                raise UserError(f"data source '{self.source}' gave a loader process no image that can be used")

    def _read(self, shard: int) -> Iterator[tuple[int, dict[str, Any]]]:
        with readable_source(self.source):
            stream = self.rows.shard(num_shards=self.rows.num_shards, index=shard)
            tables = stream.iter(READ)  # not split by loader process
            yield from enumerate(chain.from_iterable(table.to_pylist() for table in tables), shard * ROWS)

    def _passes(self, worker: int, start: int, seed: tuple[int, int]) -> Iterator[Iterator[tuple[int, dict[str, Any]]]]:
        """Yields the shuffled rows of a loader process from a place on, and then all of them again and again."""
        order = np.random.default_rng(seed).permutation(self.shards.rows.num_shards)
        while True:
            rows = shuffled(self._rows(worker, order), self.buffer, (*seed, self.rank, worker))
            start -= sum(1 for _ in islice(rows, start))
            if not start:  # otherwise the place is in a later pass
                yield rows

    def _sample(self, number: int, row: dict[str, Any], seed: int) -> Sample:
        return self.reader(row, number, f"row {number % ROWS} of shard {number // ROWS}", seed)


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
