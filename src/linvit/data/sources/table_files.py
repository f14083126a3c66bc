"""Looks at the headers of files of tables before `datasets` makes anything of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from linvit.data.sources.labels import MAX_CLASSES
from linvit.errors import UserError


def check_tables(path: Path, kind: str) -> None:
    """Raises a `UserError` if a file of a kind, or a saved one, is special, malformed, or claims too much."""
    suffix = "arrow" if kind == "saved" else kind
    for file in [path] if path.is_file() else sorted({*path.glob(f"*.{suffix}"), *path.glob(f"*/*.{suffix}")}):
        if not file.is_file():
            raise UserError(f"'{file}' is not a regular file; move it away")
        if suffix == "parquet":
            metadata = pyarrow.parquet.read_metadata(file)
            if metadata.num_rows > file.stat().st_size:  # of which each has an image
                raise UserError(f"'{file}' claims {metadata.num_rows} rows, more than it has bytes")
            _check_classes(file, (metadata.metadata or {}).get(b"huggingface", b"{}"))
        elif suffix == "arrow":
            _check_classes(file, _validated(file).get(b"huggingface", b"{}"))
    for file in path.glob("**/*.json") if kind == "saved" else ():
        text = file.read_bytes()
        _check_classes(file, text)
        if b"://" in text and file.name != "dataset_info.json":  # which may quote where a set once came from
            raise UserError(f"'{file}' names an address; the parts of a saved set are files beside it")


def _validated(file: Path) -> dict[bytes, bytes]:
    """The metadata of an arrow file whose offsets all lie within it: others would be read outside of its memory."""
    with pyarrow.memory_map(str(file)) as stream:
        try:
            reader = pyarrow.ipc.open_stream(stream)
            batches: Iterator[pyarrow.RecordBatch] = iter(reader)
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(stream)
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        for batch in batches:
            batch.validate(full=True)
        return reader.schema.metadata or {}


def _check_classes(file: Path, text: bytes) -> None:
    """Raises a `UserError` for a feature of so many unnamed classes that their numbers would fill the memory."""
    parts: list[Any] = [json.loads(text)]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            classes = part.get("num_classes")
            if isinstance(classes, int | float) and classes > MAX_CLASSES:
                raise UserError(f"'{file}' claims a column of {classes} classes; at most {MAX_CLASSES} are taken")
            parts += part.values()
        elif isinstance(part, list):
            parts += part
