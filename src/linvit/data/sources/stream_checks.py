"""What can be wrong with a stream, found before it starts."""

import datasets

from linvit.data.sources.shards import Shards
from linvit.errors import UserError


def check_consumers(shards: Shards, ranks: int, workers: int, training: bool, source: str) -> None:
    """Raises a `UserError` if some processes would have nothing to read.

    Where the length of every shard is known, rows are shared out and any number of processes will do. Otherwise whole
    shards are, and in training each loader process of each rank needs one.
    """
    available, unit = (shards.rows.num_shards, "shards") if shards.counts is None else (sum(shards.counts), "rows")
    needed = ranks * workers if training and shards.counts is None else ranks
    if available < needed:
        each = f" x {workers} loader processes" if needed > ranks else ""
        fewer = f"lower --data.num_workers to {available // ranks}, " if needed > ranks and available >= ranks else ""
        raise UserError(
            f"data source '{source}' has {available} {unit} to stream, too few for {ranks} devices{each}; "
            f"{fewer}use fewer devices, or write the data into more files"
        )


def total_of(shards: Shards, given: int | None, source: str) -> int:
    """Rows of a training stream, from its files or the configuration."""
    if shards.total is None and given is None:
        raise UserError(
            f"nothing says how many rows the training split of '{source}' has, so that all devices could do "
            f"equally many steps; set --data.streaming_rows"
        )
    if given is not None and shards.total is not None and given > shards.total:
        raise UserError(f"--data.streaming_rows={given}, but '{source}' has {shards.total}; leave it out")
    return shards.total or 0 if given is None else given


def check_stream_options(
    streaming: bool, rows: int | None, buffer: int, repeated_aug: int
) -> tuple[int, int | None] | None:
    """The buffer and the number of rows of a stream, or None if nothing is streamed."""
    if buffer < 1:
        raise UserError(f"shuffle_buffer must be 1 (no shuffling within a shard) or more; got {buffer}")
    if rows is not None and rows < 1:
        raise UserError(f"streaming_rows must be 1 or more; got {rows}")
    if streaming and repeated_aug > 1:
        raise UserError(
            f"a stream gives each image once per epoch; got repeated_aug={repeated_aug}. Leave out --data.streaming"
        )
    return (buffer, rows) if streaming else None


def check_stream_labels(
    splits: dict[str, datasets.IterableDataset], label: str, source: str
) -> dict[str, datasets.IterableDataset]:
    """The splits, if their labels are class indices: words can only be numbered by one who has seen them all."""
    kind = getattr(next(iter(splits.values())).features[label], "dtype", "no value")
    if not kind.startswith(("int", "uint")):
        raise UserError(
            f"column '{label}' of data source '{source}' ({kind}) holds no class indices, which streaming needs; "
            f"name another one with --data.label_column, or leave out --data.streaming"
        )
    return splits


def stream_classes(expected: int | None, source: str) -> int:
    """The number of classes of a stream whose labels have no names."""
    if expected is None:
        raise UserError(f"the labels of '{source}' have no names and are not read beforehand; set --data.num_classes")
    return expected
