"""Curves as a table: metrics.csv, one row per step."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only


class CsvLogger(Logger):
    """Writes `metrics.csv`, a row per step and a column per tag.

    Lightning's CSVLogger deletes the table of a run that is continued. This one goes on with it.

    Args:
        folder: Of the run.
        purge_step: Step that the run is continued from: rows of it and later ones, which a run that was killed may have
            left, are dropped. None keeps all.
    """

    def __init__(self, folder: str | Path, purge_step: int | None = None) -> None:
        super().__init__()
        self.file = Path(folder) / "metrics.csv"
        self.purge_step = purge_step
        self._columns: list[str] | None = None  # those of the file; None until it is opened
        self._row: dict[str, float] = {}

    @property
    def name(self) -> str:
        """Of the run's configuration."""
        return self.file.parent.parent.name

    @property
    def version(self) -> str:
        """Of the run."""
        return self.file.parent.name.removeprefix("version_")

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Keeps none: config.yaml does."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds to the row of a step; a new step sends the row before it to the file."""
        if step != self._row.get("step"):
            self._send()
            self._row = {"step": 0 if step is None else step}
        self._row |= metrics

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Sends the last row to the file."""
        self._send()

    def _send(self) -> None:
        if len(self._row) <= 1:
            return
        if self._columns is None:
            self._columns = self._open()
        row, self._row = self._row, {}
        new = [tag for tag in row if tag not in self._columns]
        if new:
            rows = self._rows()
            self._columns += new
            self._rewrite(rows)
        with self.file.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def _open(self) -> list[str]:
        """Drops what a continued run will write again; returns the columns of the file."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        if not self.file.exists():
            return []
        rows = self._rows()
        self._columns = list(rows[0]) if rows else []
        if self.purge_step is not None:
            self._rewrite([row for row in rows if row["step"].isdigit() and int(row["step"]) < self.purge_step])
        return self._columns

    def _rows(self) -> list[dict[str, str]]:
        """The file's rows; one that a killed run wrote in part has no value in some columns."""
        if not self.file.exists():
            return []
        with self.file.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file, restval=""))

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Replaces the file at once, so that a run killed meanwhile loses nothing."""
        beside = self.file.with_suffix(".part")
        with beside.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self._columns or [])
            writer.writeheader()
            writer.writerows(rows)
        beside.replace(self.file)
