"""A stream of samples, split over ranks and loader processes.

Where files contain their number of rows (parquet, arrow), an epoch is shared out in whole batches: each
process reads a range of its own, and together they are the epoch. Of others (tar, JSON) whole shards are shared out.

Training: every rank does floor(total / (ranks x batch)) batches. A process whose rows run out early, because images
are skipped or shards are short, begins them again. The n-th sample of a loader process has the n-th row of its share,
after shuffling, or the next one with a usable image. So an epoch continues anywhere in the same numbers of ranks,
loader processes and samples per batch; in others it starts again.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, count, islice
from typing import Any, NamedTuple, TypeVar

import datasets
import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from torch.utils.data import IterableDataset, get_worker_info

from linvit.data.loading.sampler import TrainOrder, WorkerTopology
from linvit.data.loading.seeds import sample_seeds
from linvit.data.sources.bad_images import BadImages
from linvit.data.sources.images import Reader, Sample
from linvit.data.sources.read import BadImageError
from linvit.data.sources.splits import find_source, named, readable_source
from linvit.errors import UserError

FEW = 128  # files; of fewer, each row group counts as a shard of its own, which shuffles better
ROWS = 2**32  # more than a shard has: numbers its rows where nobody knows how many the shards before it have
READ = 64  # rows that are taken from the stream at once
DRAWN = 1024  # random numbers that are drawn at once
T = TypeVar("T")


class Shards(NamedTuple):
    """One split of a stream: the rows of each part and of all; None where nothing says it."""

    rows: datasets.IterableDataset
    counts: list[int] | None
    total: int | None


class Part(NamedTuple):
    """Rows `start` to `stop` of a shard; None is its end. Its first row has the number `first` in the whole split."""

    shard: int
    start: int
    stop: int | None
    first: int


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


def assign(shards: Shards, order: np.ndarray, start: int, stop: int) -> list[Part]:
    """The parts that hold rows `start` to `stop` of the split when its shards come in the given order."""
    assert shards.counts is not None
    firsts = np.cumsum([0, *shards.counts])
    parts, position = [], 0
    for shard in order.tolist():
        count = shards.counts[shard]
        low, high = max(start - position, 0), min(stop - position, count)
        if low < high:
            parts.append(Part(shard, low, high, int(firsts[shard]) + low))
        position += count
    return parts


def _counted(rows: datasets.IterableDataset, builder: datasets.DatasetBuilder) -> Shards:
    """Adds what the files say about their length: parquet and arrow files do, from their ends or headers."""
    files = [str(file) for file in (builder.config.data_files or {}).get(rows.split, [])]
    if files and all(file.endswith(".parquet") for file in files):
        with ThreadPoolExecutor(16) as pool:
            groups = list(pool.map(_parquet_counts, files))
        finer = rows.reshard() if len(files) < FEW else rows
        for stream, counts in (
            (finer, [count for file in groups for count in file]),
            (rows, [sum(file) for file in groups]),
        ):
            if stream.num_shards == len(counts):
                return Shards(stream, counts, sum(counts))
    if files and all(file.endswith(".arrow") for file in files) and rows.num_shards == len(files):
        counts = [_arrow_count(file) for file in files]
        return Shards(rows, counts, sum(counts))
    info = (builder.info.splits or {}).get(rows.split)
    return Shards(rows, None, info.num_examples if info is not None and info.num_examples else None)


def _parquet_counts(file: str) -> list[int]:
    """Rows of each row group; of a file on the hub only its end is read."""
    with fsspec.open(file, "rb") as stream:
        metadata = pyarrow.parquet.read_metadata(stream)
    return [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]


def _arrow_count(file: str) -> int:
    """Rows of an arrow file of either kind; nothing but its headers is read."""
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


class Stream(TrainOrder, IterableDataset[Sample]):
    """Samples of one split as they are streamed; without a seed those of evaluation, in order, every row once.

    The order is a function of (seed, epoch, ranks, loader processes); the augmentation of a sample of (seed, epoch,
    row), as without streaming.
    """

    def __init__(
        self,
        shards: Shards,
        reader: Reader,
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
        self.topology = WorkerTopology(world_size, max(num_workers, 1), batch_size)
        check_consumers(shards, world_size, self.topology.workers, seed is not None, source)
        self.shards = shards
        self.rows = reader.columns_of(shards.rows)
        self.buffer = buffer
        self.reader = reader
        self.rank = rank
        self.bad = bad
        self.source = source
        self.seed = seed
        self.epoch = torch.zeros((), dtype=torch.int64).share_memory_()  # loader processes live longer than an epoch
        self.length: int | None = None
        if seed is not None:
            if shards.total is None and total is None:
                raise UserError(f"nothing says how many rows '{source}' trains on; set --data.streaming_rows")
            if total is not None and shards.total is not None and total > shards.total:
                raise UserError(f"--data.streaming_rows={total}, but '{source}' has {shards.total}; leave it out")
            self.total = total or shards.total or 0
            bad.start(self.total)
            self.length = self.topology.epoch_samples(self.total) // world_size
            self.begin = rank * self.length
        elif shards.counts is not None:
            rows = sum(shards.counts)
            self.begin = rank * rows // world_size
            self.length = (rank + 1) * rows // world_size - self.begin

    def __len__(self) -> int:
        """Samples of this rank in an epoch."""
        if self.length is None:
            raise TypeError("the files do not say how many rows they have")
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

    def _share(self, worker: int, order: np.ndarray) -> tuple[list[Part], int]:
        """What a loader process reads of the shards in an order, and how many samples of an epoch are its own."""
        ranks, workers, size = self.topology
        if self.shards.counts is None:
            chosen = order[self.rank * workers + worker :: ranks * workers]
            parts = [Part(shard, 0, None, shard * ROWS) for shard in chosen.tolist()]
            if self.seed is None:
                return parts, 0
        first, last = (size * batch for batch in worker_batches(-(-len(self) // size), worker, workers))
        first, last = min(first, len(self)), min(last, len(self))
        if self.shards.counts is not None:
            parts = assign(self.shards, order, self.begin + first, self.begin + last)
        return parts, last - first

    def _in_order(self, worker: int) -> Iterator[Sample]:
        """Yields the share of a loader process in evaluation; an image that cannot be decoded ends the run."""
        parts, _ = self._share(worker, np.arange(self.shards.rows.num_shards))
        for number, row in self._read(parts):
            try:
                yield self._sample(number, row, 0)
            except BadImageError as error:
                self.bad.record(error, number)

    def _training(self, process: int) -> Iterator[Sample]:
        """Yields the rest of the share of a loader process in training, each sample with the seed of its own row."""
        seed, done, workers = (self.seed or 0, int(self.epoch)), self.batches_done, self.topology.workers
        worker = (process + done) % workers  # the loader starts with process 0
        parts, count = self._share(worker, np.random.default_rng(seed).permutation(self.shards.rows.num_shards))
        start = len(range(worker, done, workers)) * self.topology.batch_size  # it takes batches from each in turn
        left, seeds = count - start, list[int]()
        if left <= 0:
            return
        found = True
        for rows in self._passes(parts, start, seed):
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

    def _read(self, parts: Iterable[Part]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the rows of some parts, undecoded: their numbers in the split, and their cells by column."""
        with readable_source(self.source):
            for part in parts:
                stream = self.rows.shard(num_shards=self.rows.num_shards, index=part.shard)
                tables = (stream.skip(part.start) if part.start else stream).iter(READ)  # not split by loader process
                rows = chain.from_iterable(table.to_pylist() for table in tables)
                length = None if part.stop is None else part.stop - part.start
                yield from enumerate(islice(rows, length), part.first)

    def _passes(
        self, parts: list[Part], start: int, seed: Sequence[int]
    ) -> Iterator[Iterator[tuple[int, dict[str, Any]]]]:
        """Yields the shuffled rows of some parts from a place on, and then all of them again and again."""
        while True:
            rows = shuffled(self._read(parts), self.buffer, (*seed, parts[0].first))
            start -= sum(1 for _ in islice(rows, start))
            if not start:  # otherwise the place is in a later pass
                yield rows

    def _sample(self, number: int, row: dict[str, Any], seed: int) -> Sample:
        counted = self.shards.counts is not None
        place = f"row {number}" if counted else f"row {number % ROWS} of shard {number // ROWS}"
        return self.reader(row, number, place, seed)


def check_consumers(shards: Shards, ranks: int, workers: int, training: bool, source: str) -> None:
    """Raises a `UserError` if some processes would have nothing to read."""
    available, unit = (shards.rows.num_shards, "shards") if shards.counts is None else (sum(shards.counts), "rows")
    if available < (ranks * workers if training and shards.counts is None else ranks):
        raise UserError(
            f"data source '{source}' has {available} {unit} to stream, too few for {ranks} devices x {workers} loader "
            f"processes; lower --data.num_workers, use fewer devices, or write the data into more files"
        )


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
