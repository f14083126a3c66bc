"""Writes the checkpoints of a run, the last and the best ones, atomically."""

import io
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from linvit.errors import UserError, check_choice
from linvit.io.files import (
    BEST,
    BEST_AVERAGE,
    CHECKPOINTS,
    LAST,
    check_reserved,
    link,
    lock,
    make_folder,
    resume_command,
    sweep,
    unlock,
    write_bytes,
)
from linvit.weights import torch_file

EPOCHS = "epochs"
"""Key of the epochs of the best values in the state of `SaveCheckpoints`; the values have the names of metrics."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint to a temporary file and renames it when it is on disk.

    After a kill, a full disk or a power cut at any moment, the old file or the new one exists, never a part.

    Use it in any program: `Trainer(plugins=[AtomicCheckpointIO()])`. Paths with "://" are left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Writes a checkpoint."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(path)
        try:
            make_folder(path.parent)
            # In memory, as Lightning does: errors of torch.save on a file lack the system's reason.
            archive = io.BytesIO()
            torch.save(on_cpu(checkpoint), archive)
            write_bytes(path, archive.getbuffer())
        except OSError as error:
            raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def on_cpu(content: Any) -> Any:
    """Copies GPU tensors in nested dictionaries and sequences; `torch.save` would synchronise for each of them.

    Tensors that share their memory still do, and dictionaries keep their attributes, as those of `state_dict()` do.
    """
    copies: dict[int, torch.UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if type(value) is Tensor and value.is_cuda and not value.requires_grad:
            storage = value.untyped_storage()
            if (place := storage.data_ptr()) not in copies:
                copies[place] = torch.UntypedStorage(storage.nbytes()).copy_(storage, non_blocking=True)
            own = torch.empty(0, dtype=value.dtype)
            return own.set_(copies[place], value.storage_offset(), value.shape, value.stride())
        if type(value) in (list, tuple):
            return type(value)(map(copied, value))
        if type(value) in (dict, OrderedDict):
            made = type(value)((key, copied(item)) for key, item in value.items())
            getattr(made, "__dict__", {}).update(getattr(value, "__dict__", {}))
            return made
        return value

    found = copied(content)
    if not copies:
        return content
    torch.cuda.synchronize()
    return found


@dataclass
class Best:
    """Checkpoint with the best value of a metric in a folder: its name, and the value, or None."""

    monitor: str
    mode: Literal["min", "max"]
    name: str
    value: float | None = None
    epoch: int | None = None  # in which it was scored, counted from 1
    compared: bool = False  # True after comparison with its file, unnecessary if this process scored it

    def take(self, value: float, epoch: int) -> bool:
        """Stores a value if it is the best, and returns True if so. Of equal values the last wins (longer training)."""
        sign = 1 if self.mode == "max" else -1
        if not math.isfinite(value) or (self.value is not None and sign * value < sign * self.value):
            return False
        self.value, self.epoch, self.compared = value, epoch, True
        return True


class SaveCheckpoints(Checkpoint):
    """Writes last.ckpt after every epoch and every validation, and when `save` is called.

    The best state is also named best.ckpt, and with a moving average the epoch whose average scored best
    best_ema.ckpt. The folder is reserved for this run while it trains, and unfinished files of killed runs in it are
    deleted. A run whose folder is renamed or deleted meanwhile ends at the next validation or checkpoint.

    last.ckpt is written last: the loggers have then written all rows, and the best checkpoints have their names. So
    a run that is resumed after a kill repeats the rest.
    If a checkpoint cannot be written, because the disk is full or read-only, the run ends on all ranks: the error
    has the command to resume it from the previous checkpoint, which is unchanged.
    For several or other checkpoints, add Lightning's `ModelCheckpoint` to `trainer.callbacks`.

    Args:
        monitor: Metric that selects the best checkpoint; null keeps none. Metrics that begin with "val/" count only
            right after a validation.
        mode: Best value of the metric: the smallest ("min") or the largest ("max").
    """

    def __init__(self, monitor: str | None = "val/score", mode: Literal["min", "max"] = "max") -> None:
        check_choice("checkpoint.mode", mode, ["min", "max"])
        self.best = [] if monitor is None else [Best(monitor, mode, BEST)]
        self.dirpath: str | None = None
        self.config = "config.yaml"  # of the run, from which it is continued; beside the folder
        self._reserved: Path | None = None  # the folder, on rank 0 while it trains
        self._scored = False  # since the last save of a best state

    def state_dict(self) -> dict[str, Any]:
        """Returns the best value of each metric, and the epoch in which it was scored."""
        epochs = {best.monitor: best.epoch for best in self.best}
        return {**{best.monitor: best.value for best in self.best}, EPOCHS: epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the values."""
        epochs = state_dict.get(EPOCHS)
        for best in self.best:
            given, epoch = state_dict.get(best.monitor), epochs.get(best.monitor) if isinstance(epochs, dict) else None
            best.value = given if isinstance(given, float) else None
            best.epoch = epoch if isinstance(epoch, int) else None
            best.compared = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reserves the folder and deletes unfinished files, before training starts."""
        if getattr(pl_module, "ema", None) is not None and len(self.best) == 1:
            raw = self.best[0]
            if raw.monitor.startswith("val/"):
                average = raw.monitor.replace("val/", "val/ema_", 1)
                self.best.append(Best(average, raw.mode, BEST_AVERAGE))
        self.dirpath = trainer.strategy.broadcast(checkpoint_folder(trainer))
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()
        if stage == "fit":
            folder = Path(str(self.dirpath))
            if self._writes(trainer) and (reason := on_rank_zero(trainer, reserve, folder)):
                raise UserError(f"checkpoints cannot be saved to '{folder}': {reason}")
            self._reserved = folder if self._writes(trainer) and trainer.is_global_zero else None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the folder before reports are written to it."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._check_folder(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves after a validation, unless the epoch ends with it, which saves."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._scored = True
            if trainer.check_val_every_n_epoch != 1 or trainer.val_check_interval != 1.0:
                self._save_and_choose(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves at the end of each epoch, also where validation is within epochs or not after each."""
        self._save_and_choose(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the folder a last time."""
        self._check_folder(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Saves if a validation fails, as by a damaged image; not with several ranks, since others may not fail."""
        failed = isinstance(exception, Exception) and trainer.world_size == 1
        if not failed or trainer.state.fn != "fit" or not trainer.validating:
            return
        with suppress(UserError):  # `exception` may be one
            self.save(trainer)
            rank_zero_info(
                f"the validation at step {trainer.global_step} has failed; the trained state is saved. Resume with "
                f"the validation:\n  {resume_command(Path(str(self.dirpath)).parent / self.config)}"
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Releases the folder."""
        if stage == "fit" and self.dirpath is not None:
            unlock(Path(self.dirpath))
            self._reserved = None

    def _save_and_choose(self, trainer: Trainer) -> None:
        """Saves, also under the name of a best checkpoint if this state is one."""
        self._compare_with_files()
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        # Without a new validation the score belongs to other weights, for example if max_steps ends an epoch early.
        due = [best for best in self.best if self._scored or not best.monitor.startswith("val/")]
        self._scored = False
        if due:
            check_choice("checkpoint.monitor", self.best[0].monitor, sorted(values))
        epoch = trainer.current_epoch + 1
        names = [best.name for best in due if best.monitor in values and best.take(values[best.monitor], epoch)]
        self.save(trainer, trainer.strategy.broadcast(names))

    def _compare_with_files(self) -> None:
        """Forgets best values whose file is missing, damaged, or of another state, with a warning.

        After a resume from an earlier checkpoint, files of later ones still exist. Files are read once.
        """
        there = self._reserved is not None and self._reserved.is_dir()
        for best in self.best if there else []:
            path = Path(str(self.dirpath), best.name)
            if best.value is None or (best.compared and path.is_file()):
                continue
            kept, best.compared = self._kept(path, best), True
            if kept == (best.value, best.epoch):
                continue
            found = "is missing or damaged" if kept is None else f"is that of epoch {kept[1]}, {kept[0]}"
            rank_zero_warn(
                f"the best {best.monitor} was {best.value} of epoch {best.epoch}, but '{path}' {found}: the best from "
                f"now on takes its place"
            )
            best.value = best.epoch = None

    def _kept(self, path: Path, best: Best) -> tuple[Any, Any] | None:
        """Returns value and epoch in the file of a best state; None if it is missing or damaged."""
        if not path.is_file():
            return None
        try:
            state = torch_file.load(path)["callbacks"][self.state_key]
            return state[best.monitor], (state.get(EPOCHS) or {}).get(best.monitor)
        except UserError:  # damaged
            return None
        except Exception:  # of other storage
            return best.value, best.epoch

    def save(self, trainer: Trainer, names: Sequence[str] = ()) -> None:
        """Writes last.ckpt, also under other names, on all ranks, between two optimiser steps.

        Raises a `UserError` on all ranks on failure.
        """
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._check_folder(trainer)
        log_now(trainer)
        for logger in trainer.loggers:
            logger.save()
        linked = isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO) and self._writes(trainer)
        paths = [os.path.join(str(self.dirpath), name) for name in (*names, LAST)]
        for path in paths[:1] if linked else paths:
            self._write(trainer, path)
        # A kill before the last name leaves the previous last.ckpt, from which a resumed run repeats all of it.
        for path in paths[1:] if linked else []:
            self._check_saved(trainer, path, on_rank_zero(trainer, link, Path(paths[0]), Path(path)))

    def _write(self, trainer: Trainer, path: str) -> None:
        reason = None
        try:
            trainer.save_checkpoint(path, weights_only=False)
        except OSError as error:
            reason = error.strerror or str(error)
            trainer.strategy.barrier("Trainer.save_checkpoint")  # the other ranks wait there
        self._check_saved(trainer, path, trainer.strategy.broadcast(reason))

    def _check_saved(self, trainer: Trainer, path: str, reason: str | None) -> None:
        """Raises a `UserError` if a file could not be written, with the reason."""
        if reason is not None:
            raise UserError(
                f"the run has ended at step {trainer.global_step}, since checkpoint '{path}' could not be saved: "
                f"{reason}. Earlier checkpoints are unchanged. Correct that, then resume with\n"
                f"  {resume_command(Path(path).parent.parent / self.config)}"
            )

    def _check_folder(self, trainer: Trainer) -> None:
        """Raises a `UserError` on all ranks if the folder was renamed or deleted: nothing is written in its place."""
        if self._writes(trainer) and (reason := on_rank_zero(trainer, self.check_folder)):
            raise UserError(reason)

    def check_folder(self) -> None:
        """Raises a `UserError` if the folder that this process has reserved was renamed or deleted."""
        if self._reserved is not None:
            check_reserved(self._reserved, self.config)

    def _writes(self, trainer: Trainer) -> bool:
        """True if the run saves to a folder of this machine's file systems."""
        return not trainer.fast_dev_run and "://" not in str(self.dirpath)  # type: ignore[attr-defined]


def checkpoint_folder(trainer: Trainer) -> str:
    """Returns the folder of a run's checkpoints, the same as that of Lightning's `ModelCheckpoint`."""
    if not trainer.loggers:
        return os.path.join(trainer.default_root_dir, CHECKPOINTS)
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name), version, CHECKPOINTS)


def log_now(trainer: Trainer) -> None:
    """Writes the metrics of a step or an epoch of training, as Lightning does only after the hooks at its end.

    There is no public function for this. Without it, a kill between a checkpoint and its rows would lose the rows.
    """
    connector = trainer._logger_connector
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    if batch.processed > batch.completed:
        connector.update_train_step_metrics()
    elif trainer.training:
        connector.log_metrics(connector.metrics["log"], step=trainer.global_step - 1)


def reserve(folder: Path) -> None:
    """Locks a folder and deletes unfinished files of killed runs in it."""
    lock(folder)
    for path in sweep(folder):
        rank_zero_info(f"deleted '{path}', an unfinished file of a killed run")


def on_rank_zero(trainer: Trainer, work: Callable[..., None], *args: Any) -> str | None:
    """Calls a function on rank 0; returns the reason of its failure on all ranks, or None."""
    reason = None
    if trainer.is_global_zero:
        try:
            work(*args)
        except (UserError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error)
    return trainer.strategy.broadcast(reason)
