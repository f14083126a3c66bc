"""Writes the curves of a run as a table: metrics.csv, one row per step."""

import csv
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn


class CsvLogger(Logger):
    """Writes `metrics.csv`, a row per step and a column per tag.

    Lightning's CSVLogger deletes the table of a run that is resumed. This one continues it.

    Args:
        folder: Folder of the run, or a function that returns it when the first row is written.
        purge_step: Step from which the run is resumed. Rows of this and later steps, which a killed run may have left,
            are deleted. None keeps all.
    """

    def __init__(self, folder: str | Path | Callable[[], str], purge_step: int | None = None) -> None:
        super().__init__()
        self._folder = folder
        self.purge_step = purge_step
        self._columns: list[str] | None = None  # those of the file; None until it is opened
        self._row: dict[str, float] = {}

    @cached_property
    def file(self) -> Path:
        """The table."""
        return Path(self._folder() if callable(self._folder) else self._folder) / "metrics.csv"

    @property
    def name(self) -> str:
        """Name of the run's configuration."""
        return self.file.parent.parent.name

    @property
    def version(self) -> str:
        """Number of the run."""
        return self.file.parent.name.removeprefix("version_")

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Writes nothing: they are in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds to the row of a step; a new step writes the row before it to the file."""
        if step != self._row.get("step"):
            self._write_row()
            self._row = {"step": 0 if step is None else step}
        self._row |= metrics

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes the last row to the file."""
        self._write_row()

    def _write_row(self) -> None:
        row, self._row = self._row, {}
        if len(row) > 1:
            try:
                self._append(row)
            except OSError as error:
                rank_zero_warn(f"'{self.file}' could not be written, rows are missing: {error.strerror}")

    def _append(self, row: dict[str, float]) -> None:
        if self._columns is None:
            self._columns = self._open()
        new = [tag for tag in row if tag not in self._columns]
        if new:
            rows = self._rows()
            self._columns += new
            self._rewrite(rows)
        size = self.file.stat().st_size
        try:
            with self.file.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self._columns).writerow(row)
        except OSError:
            os.truncate(self.file, size)  # no part of a row
            raise

    def _open(self) -> list[str]:
        """Deletes the rows that a resumed run will write again; returns the columns of the file."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if not self.file.exists():
            return []
        rows = self._rows()
        self._columns = list(rows[0]) if rows else []
        if self.purge_step is not None:
            self._rewrite([row for row in rows if row["step"].isdigit() and int(row["step"]) < self.purge_step])
        return self._columns

    def _rows(self) -> list[dict[str, str]]:
        """The rows of the file; one that a killed run wrote in part has no value in some columns."""
        if not self.file.exists():
            return []
        with self.file.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file, restval=""))

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Replaces the file in one operation, so that nothing is lost if the run is killed meanwhile."""
        part = self.file.with_suffix(".part")
        with part.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns or [])
            writer.writeheader()
            writer.writerows(rows)
        part.replace(self.file)
