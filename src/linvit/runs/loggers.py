"""Loggers of a run: TensorBoard and a table in its folder."""

import csv
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from torch.utils.tensorboard import SummaryWriter

from linvit.io.files import rewriting, sync
from linvit.runs.folder import VERSION, claim_version, next_version, read_curves
from linvit.runs.trainer import as_list


class CsvLogger(Logger):
    """Writes `metrics.csv`, a row per step and a column per tag; Lightning's logger deletes that of a resumed run.

    Lightning calls `save` after every row. New rows are appended, because a long run has tens of thousands; the file is
    replaced if a column is new or an existing row has changed. A folder that is renamed or deleted while the run trains
    is not created again.
    """

    def __init__(self, folder: str | Path | Callable[[], str], purge_step: int | None = None) -> None:
        super().__init__()
        self._folder = folder
        self.purge_step = purge_step
        self._new: dict[str, dict[str, str]] = {}  # rows that are not yet in the file
        self._columns: list[str] = []  # columns of the file; empty if it is to be replaced

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
        """Does nothing: hyper-parameters are in config.yaml."""

    @cached_property
    def _rows(self) -> dict[str, dict[str, str]]:
        """Rows by step; at first those that a resumed run does not write again. A kill may truncate the last row."""
        if self.purge_step is None:
            return {}
        found: dict[str, dict[str, str]] = {}
        for step, values in read_curves(self.file):
            if step < self.purge_step:
                found.setdefault(str(step), {"step": str(step)}).update(values)
        return found

    @property
    def count(self) -> int:
        """Number of rows."""
        return len(self._rows)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Adds values to the row of a step."""
        at = str(step or 0)
        if at not in self._rows:
            self._rows[at] = self._new[at] = {"step": at}
        self._rows[at] |= {tag: str(value) for tag, value in metrics.items()}
        if at not in self._new:  # values logged after `save` are written at once, not with the next row
            self._columns = []
            self._write()

    @rank_zero_only
    def save(self) -> None:
        """Writes new rows and waits until they are on disk."""
        if self._new:
            self._write()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Writes new rows; after an error, a failure of the disk does not hide that error."""
        with suppress(OSError) if status == "failed" else nullcontext():
            self.save()

    def _write(self) -> None:
        appended = bool(self._columns) and all(row.keys() <= set(self._columns) for row in self._new.values())
        appended &= self.file.exists() and self.file.stat().st_size > 0  # else it was deleted or emptied meanwhile
        rows = self._new if appended else self._rows
        columns = self._columns if appended else [*dict.fromkeys(tag for row in rows.values() for tag in row)]
        self._columns = []  # if the disk accepts only a part, the file is replaced next time
        with nullcontext(self.file) if appended else rewriting(self.file) as path:
            with path.open("a" if appended else "w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, columns)
                if not appended:
                    writer.writeheader()
                writer.writerows(rows.values())
            sync(path)
        self._columns = columns
        self._new.clear()


class RowCount(Callback):
    """Stores in each checkpoint the number of rows of metrics.csv, and warns in a resumed run if rows are missing."""

    def __init__(self, table: CsvLogger) -> None:
        self.table = table

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of rows."""
        return {"rows": self.table.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Compares the number of rows with that in the checkpoint."""
        rows, found = state_dict.get("rows"), self.table.count
        if isinstance(rows, int) and found < rows:
            rank_zero_warn(
                f"{rows - found} of the {rows} rows that '{self.table.file}' had at this checkpoint are missing: its "
                f"curves have gaps. The best checkpoint and its score are not affected: the checkpoint stores them"
            )


class NoEvents:
    """Replaces a `SummaryWriter` and writes nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class RunTensorBoardLogger(TensorBoardLogger):
    """Lightning's logger, with the hyper-parameters of a resumed run in hparams.yaml. Tags are those of metrics.csv."""

    _writer: SummaryWriter | None = None
    _written: tuple[int | None, Mapping[str, float]] | None = None

    def __init__(
        self, versions: Path, resumed: str | None = None, purge_step: int | None = None, events: bool = True
    ) -> None:
        super().__init__(versions.parent, versions.name, default_hp_metric=False)
        self._resumed, self._purge_step, self._events = resumed, purge_step, events

    @cached_property
    def version(self) -> int | str:
        """Version of the run. That of a new run is chosen, and its folder created, on first access, so it is unique."""
        folder = Path(self.root_dir)
        if self._resumed is not None:
            return int(self._resumed.removeprefix("version_")) if VERSION.fullmatch(self._resumed) else self._resumed
        return claim_version(folder) if rank_zero_only.rank == 0 else next_version(folder)  # type: ignore[attr-defined]

    @property
    def log_dir(self) -> str:
        """Folder of the run under its literal name: Lightning would replace `$NAME` by the value of a variable."""
        return str(Path(self.root_dir, self.version if isinstance(self.version, str) else f"version_{self.version}"))

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Writer of the event file; a `NoEvents` if none is to be written."""
        if not self._events:
            return NoEvents()
        if self._writer is None:
            Path(self.log_dir).stat()  # a folder that was renamed or deleted is not created again
            self._writer = SummaryWriter(self.log_dir, purge_step=self._purge_step)
        return self._writer

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes curves."""
        if self._written == (step, metrics):  # a step that was logged before its checkpoint is logged again at its end
            return
        self._written = step, dict(metrics)
        super().log_metrics(metrics, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Deletes the existing hparams.yaml of the run, which `save` would keep."""
        Path(self.log_dir, self.NAME_HPARAMS_FILE).unlink(missing_ok=True)
        super().log_hyperparams(params, *args, **kwargs)

    @rank_zero_only
    def save(self) -> None:
        """Writes remaining events and the hyper-parameters, and waits until the curves are on disk."""
        super().save()
        for file in Path(self.log_dir).glob("events.out.tfevents.*"):
            sync(file)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Does the same at the end."""
        with suppress(OSError) if status == "failed" else nullcontext():
            super().finalize(status)
            if self._writer is not None:
                self._writer.close()


def run_loggers(given: Any, versions: Path, version: str | None, purge_step: int | None) -> list[Logger]:
    """Returns the loggers of a training run: those of its folder, then the given ones.

    False means no other loggers and no TensorBoard events. The folder and metrics.csv are always written.
    """
    tensorboard = RunTensorBoardLogger(versions, version, purge_step, events=given is not False)
    own = [tensorboard, CsvLogger(lambda: tensorboard.log_dir, purge_step)]
    return [*own, *(other for other in as_list(given) if isinstance(other, Logger))]
