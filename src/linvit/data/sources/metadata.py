"""Tables beside the images (metadata.csv, .tsv or .jsonl); text columns stay text.

pandas and pyarrow, by which `datasets` reads them, turn "007" into 7, "NA" into nothing and "2020-01-01" into a date.
"""

import csv
import io
import json
import os
import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from linvit.errors import UserError, did_you_mean, quote_first
from linvit.io.reading import read_start, read_text

if TYPE_CHECKING:
    import datasets

NAMES = ("metadata.csv", "metadata.tsv", "metadata.jsonl")
KEY = "file_name"
LINE = 2**20  # bytes of the first line that are looked at
SEPARATORS = ",;\t"
WHOLE = re.compile(r"0|-?[1-9]\d{0,17}")  # a number that is written as Python writes it: 007 and 1.0 are words


def find_table(folder: Path) -> Path | None:
    """Returns the file in a folder of images that names them, as sets of the hub have; None if there is none."""
    for path in (folder / name for name in NAMES):
        if path.is_file() and KEY.encode() in read_start(path, LINE).partition(b"\n")[0]:
            return path
    return None


def read_tables(tables: Mapping[str, Path], images: Mapping[str, Set[str]]) -> dict[str, "datasets.Dataset"]:
    """Returns the images of each split with the columns of its table; columns `*_file_name` are images as well.

    A column of a CSV file holds whole numbers if all of its cells in all splits are some, else text; empty cells are
    null. Values of JSON lines have the kinds that they are written with. `images` are the paths that are known to
    exist.
    """
    read = {split: _columns(path) for split, path in tables.items()}
    text = [read[split] for split, path in tables.items() if path.suffix != ".jsonl"]
    for name in {name for columns in text for name in columns if not name.endswith(KEY)}:
        if all(WHOLE.fullmatch(cell) for columns in text for cell in columns.get(name, ()) if cell is not None):
            for columns in text:
                columns[name] = [None if cell is None else int(cell) for cell in columns.get(name, ())]
    return {split: _table(tables[split], columns, images[split]) for split, columns in read.items()}


def _table(path: Path, columns: Mapping[str, list[Any]], images: Set[str]) -> "datasets.Dataset":
    import datasets
    import pyarrow as pa

    stored: dict[str, pa.Array] = {}
    features = datasets.Features()
    for name, values in columns.items():
        if name == KEY or name.endswith(f"_{KEY}"):
            column = name.removesuffix(KEY).removesuffix("_") or "image"
            files = pa.array(_files(path, values, images))
            stored[column] = pa.StructArray.from_arrays([pa.nulls(len(files), pa.binary()), files], ["bytes", "path"])
            features[column] = datasets.Image()
            continue
        try:
            stored[name] = pa.array(values)
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise UserError(
                f"column '{name}' of '{path}' has values of several kinds: {error}. Write text alone"
            ) from error
        features |= datasets.Features.from_arrow_schema(pa.schema([(name, stored[name].type)]))
    return datasets.Dataset(pa.Table.from_arrays([*stored.values()], schema=features.arrow_schema))


def _files(table: Path, names: list[Any], known: Set[str]) -> list[str]:
    """Returns the paths of the images that a table names, relative to the table's folder."""
    folder = table.parent.absolute()
    if outside := [name for name in names if not isinstance(name, str) or not _within(name)]:
        raise UserError(f"'{table}' names {outside[0]!r}; it can only name files in its folder or below")
    paths = [(folder / name).as_posix() for name in names]
    if missing := [path for path in paths if path not in known and not os.path.isfile(path)]:
        raise UserError(
            f"'{table}' names {len(missing)} of {len(names)} images that do not exist: {quote_first(missing)}. Names "
            f"are paths from the folder of the table, and have the ending of the file"
        )
    return paths


def _within(name: str) -> bool:
    inner = os.path.normpath(name)
    return bool(name) and "://" not in name and not os.path.isabs(inner) and inner.split(os.sep)[0] != os.pardir


def _columns(path: Path) -> dict[str, list[Any]]:
    """Returns the columns of a table by their names."""
    try:
        with io.StringIO(read_text(path).removeprefix("\ufeff"), newline="") as file:
            columns = _json_columns(file) if path.suffix == ".jsonl" else _csv_columns(file)
    except (ValueError, csv.Error) as error:  # bytes that are not UTF-8, and lines that are no JSON, are of the first
        raise UserError(f"cannot read '{path}': {error}") from error
    if KEY not in columns:
        raise UserError(f"'{path}' has no column '{KEY}'.{did_you_mean(KEY, columns)} It has: {', '.join(columns)}")
    return columns


def _csv_columns(file: TextIO) -> dict[str, list[Any]]:
    first = file.readline()
    separator = max(SEPARATORS, key=first.count)
    names = [name.strip() for name in next(csv.reader([first], delimiter=separator))]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"there are two columns {quote_first(twice)}")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    reader = csv.reader(file, delimiter=separator, strict=True)
    for cells in reader:
        if len(cells) not in (0, len(names)):
            raise ValueError(f"line {reader.line_num + 1} has {len(cells)} cells, the first line {len(names)}")
        for name, cell in zip(names, cells, strict=False):
            columns[name].append(cell or None)
    return columns


def _json_columns(file: TextIO) -> dict[str, list[Any]]:
    rows = [json.loads(line) for line in file if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a line is no mapping")
    return {name: [row.get(name) for row in rows] for name in dict.fromkeys(name for row in rows for name in row)}
