"""Data that is read from one end to the other: where its shards lie, how many rows each has, and who reads which."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import datasets
import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet

from linvit.data.sources.splits import find_source, load_saved, named, readable_source
from linvit.errors import UserError

FEW = 128  # files; of fewer, each row group counts as a shard of its own, which shuffles better
ROWS = 2**32  # more than a shard has: numbers its rows where nobody knows how many the shards before it have


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
        if kind == "saved":
            return {name: _memory_mapped(rows) for name, rows in named(load_saved(place["path"]), source).items()}
        if kind is None:
            raise UserError(
                f"cannot stream '{source}': expected parquet, arrow or tar files, or a set saved with save_to_disk. "
                f"Images in folders are read one by one anyway; leave out --data.streaming"
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


def whole(order: np.ndarray, consumer: int, consumers: int) -> list[Part]:
    """Every `consumers`-th shard, for streams whose files do not say how many rows a shard has."""
    return [Part(shard, 0, None, shard * ROWS) for shard in order[consumer::consumers].tolist()]


def _memory_mapped(rows: datasets.Dataset) -> Shards:
    """A table on disk, cut into shards of nearly equal length, as `to_iterable_dataset` cuts it."""
    parts = max(1, min(len(rows), FEW))
    length, more = divmod(len(rows), parts)
    counts = [length + (index < more) for index in range(parts)]
    return Shards(rows.to_iterable_dataset(num_shards=parts), counts, len(rows))


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
