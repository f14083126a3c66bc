"""The loggers of a run: TensorBoard and a table in its folder, and services that are named by a key."""

import importlib.util
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning.pytorch.loggers
from jsonargparse import Namespace
from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from torch.utils.tensorboard import SummaryWriter

from linvit.errors import UserError, check_choice
from linvit.files import sync
from linvit.runs.csv_logger import CsvLogger
from linvit.runs.folder import claim_version, next_version

KEYS = {"wandb": "WandbLogger", "mlflow": "MLFlowLogger"}
PACKAGES = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow", "CometLogger": "comet_ml", "NeptuneLogger": "neptune"}

Loggers = bool | Logger | str | list[Logger | str] | None  # bool before str, or false is a name


SCORES = ("train/", "val/", "test/")
OTHERS = "watch"
RETRY = 60.0  # seconds


class RunTensorBoardLogger(TensorBoardLogger):
    """Lightning's, with loss and score first, and with the hyper-parameters of a resumed run in hparams.yaml.

    TensorBoard sorts its groups by name, a group being what stands before the first slash. So all that is neither loss
    nor score goes to one group behind them: `watch/rank/...`, `watch/images/s`, `watch/memory/host`.

    Args:
        versions: Folder of all versions of the run.
        resumed: Version that is resumed; None starts a new one.
        purge_step: Step from which it is resumed.
    """

    _silent_until = 0.0
    _writer: SummaryWriter | None = None
    _written: tuple[int | None, Mapping[str, float]] | None = None

    def __init__(self, versions: Path, resumed: str | None = None, purge_step: int | None = None) -> None:
        super().__init__(versions.parent, versions.name, default_hp_metric=False)
        self._resumed, self._purge_step = resumed, purge_step

    @cached_property
    def version(self) -> int | str:
        """That of a new run is found when it is asked for. Its folder is made at once: no other start gets it, too."""
        folder = Path(self.root_dir)
        if self._resumed is not None:
            return int(number) if (number := self._resumed.removeprefix("version_")).isdigit() else self._resumed
        return claim_version(folder) if rank_zero_only.rank == 0 else next_version(folder)  # type: ignore[attr-defined]

    @property
    @rank_zero_experiment
    def experiment(self) -> SummaryWriter:
        """What writes the file of events."""
        if self._writer is None:
            self._writer = SummaryWriter(self.log_dir, purge_step=self._purge_step)
        return self._writer

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Writes curves, those that are neither loss nor score in the last group."""
        if self._written == (step, metrics):  # a step that was logged before its checkpoint, and is logged at its end
            return
        self._written = step, dict(metrics)
        self._unless_refused(super().log_metrics, {shown_tag(tag): value for tag, value in metrics.items()}, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Deletes the file of the run so far, which `save` would keep."""
        self._unless_refused(Path(self.log_dir, self.NAME_HPARAMS_FILE).unlink, missing_ok=True)
        self._unless_refused(super().log_hyperparams, params, *args, **kwargs)

    @rank_zero_only
    def save(self) -> None:
        """Writes what is left, and the hyper-parameters, and waits until the disk has the curves."""
        self._unless_refused(super().save)
        for file in Path(self.log_dir).glob("events.out.tfevents.*"):
            self._unless_refused(sync, file)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """The same at the end."""
        self._unless_refused(super().finalize, status)
        if self._writer is not None:
            self._unless_refused(self._writer.close)

    def _unless_refused(self, write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Writes; if the disk does not take it, says so and leaves it. A minute later a new file is begun."""
        if time.monotonic() < self._silent_until:
            return
        try:
            write(*args, **kwargs)
        except (OSError, ValueError) as error:
            reason = error if isinstance(error, OSError) else error.__cause__  # Lightning makes all errors ValueErrors
            if not isinstance(reason, OSError):
                raise
            self._writer = None  # its thread has ended
            self._silent_until = time.monotonic() + RETRY
            rank_zero_warn(f"TensorBoard's curves could not be written to '{self.log_dir}': {reason.strerror}")


def shown_tag(tag: str) -> str:
    """The name of a curve in TensorBoard."""
    return tag if tag.startswith(SCORES) else f"{OTHERS}/{tag}"


def loggers_by_key(trainer: type[Trainer]) -> None:
    """Makes `--trainer.logger=wandb` and `--trainer.logger=[wandb, mlflow]` known to the parser."""
    trainer.__init__.__annotations__["logger"] = Loggers


def check_loggers(given: Any) -> None:
    """Raises a `UserError` for an unknown key, or for a logger whose package is not installed; imports none."""
    for logger in given if isinstance(given, list) else [given]:
        if isinstance(logger, str):
            check_choice("trainer.logger", logger, [*KEYS, "or the path of a Logger's class"])
            name = KEYS[logger]
        elif isinstance(logger, Namespace):
            name = logger.class_path.rpartition(".")[2]
        else:
            continue
        package = PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(f"trainer.logger: {name} needs the package '{package}': pip install {package}")


def run_loggers(given: Any, versions: Path, version: str | None, purge_step: int | None) -> list[Logger]:
    """The loggers of a training run.

    Args:
        given: `trainer.logger`: null or true for TensorBoard and the table, keys of services to add to these, or
            loggers that replace them.
        versions: Folder of all versions of the run.
        version: Version that is resumed; None starts a new one.
        purge_step: Step from which it is resumed.
    """
    parts = given if isinstance(given, list) else [given]
    keys = [part for part in parts if isinstance(part, str)]
    loggers = [part for part in parts if isinstance(part, Logger)]
    if not loggers:
        tensorboard = RunTensorBoardLogger(versions, version, purge_step)
        loggers = [tensorboard, CsvLogger(lambda: tensorboard.log_dir, purge_step)]
    for key in keys:
        run, service = Path(str(loggers[0].log_dir or versions)), getattr(lightning.pytorch.loggers, KEYS[key])
        title = f"{versions.name}/{run.name}"
        where = {"project": "linvit", "save_dir": run} if key == "wandb" else {"experiment_name": "linvit"}
        loggers.append(service(**{"name" if key == "wandb" else "run_name": title}, **where))
    return loggers
