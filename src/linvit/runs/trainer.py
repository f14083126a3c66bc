"""Settings of a run's trainer: callbacks, precision, BatchNorm over all ranks."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ModelSummary, RichModelSummary, RichProgressBar
from lightning.pytorch.callbacks import ProgressBar as AnyProgressBar
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from timm.layers import convert_sync_batchnorm
from torch import nn

from linvit.callbacks.attention.measurement import AttentionRank
from linvit.callbacks.monitors import (
    BadImageCount,
    GradientNorm,
    ImageCount,
    LearningRates,
    Memory,
    ProgressBar,
    Throughput,
)
from linvit.callbacks.save_checkpoints import SaveCheckpoints
from linvit.callbacks.stop_on_signal import StopOnSignal
from linvit.errors import UserError
from linvit.io.files import write_text
from linvit.runs import yaml_text
from linvit.runs.folder import RESULT, run_config, run_configs
from linvit.tasks.base import Task


def default_callbacks(*, rank: bool) -> list[Callback]:
    """Returns the callbacks of every run: logging, with or without the rank of attention, and saving at a signal."""
    logging = [LearningRates(), GradientNorm(), Throughput(), Memory(), BadImageCount(), ImageCount()]
    return [*logging, *([AttentionRank()] if rank else []), StopOnSignal()]


LAUNCHERS = ("SLURM_NTASKS", "TORCHELASTIC_RUN_ID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_SIZE", "WORLD_SIZE")
"""Variables by which Lightning detects that another program starts its processes."""


def launcher_hint() -> str:
    """Returns how to start a run where a scheduler has set variables; empty without such variables."""
    names = [name for name in LAUNCHERS if name in os.environ]
    without = " ".join(f"-u {name}" for name in names)
    if not names:
        return ""
    return (
        f"The variables {', '.join(names)} say that a scheduler starts the processes: start one per device (srun "
        f"--ntasks-per-node=N linvit ..., torchrun --nproc-per-node=N -m linvit ...), or let linvit start them itself: "
        f"env {without} linvit ..."
    )


def as_list(given: Any) -> list[Any]:
    """Returns the callbacks, plug-ins or loggers of a configuration (one, several, none, true or false) as a list."""
    return [*given] if isinstance(given, list) else [given] if given else []


def add_displays(callbacks: list[Any], *, bar: bool = True, summary: bool = True) -> None:
    """Adds a plain-text progress bar and a model summary to callbacks that have none.

    Otherwise Lightning would use those of rich wherever rich is installed.
    """
    if any(isinstance(callback, RichProgressBar | RichModelSummary) for callback in callbacks):
        sys.stdout = getattr(sys.stdout, "unchecked", sys.stdout)  # their control codes may not be escaped
    if bar and not any(isinstance(callback, AnyProgressBar) for callback in callbacks):
        callbacks.append(ProgressBar())
    if summary and not any(isinstance(callback, ModelSummary) for callback in callbacks):
        callbacks.append(ModelSummary())


def check_monitors(callbacks: list[Any], task: Task, trainer: Trainer) -> None:
    """Corrects the mode of callbacks that would take the worst value of a metric for its best, with a warning.

    Raises a `UserError` for early stopping by a validation score in a run without validation.
    """
    for callback in callbacks:
        parts = callback.best if isinstance(callback, SaveCheckpoints) else [callback]
        known = isinstance(callback, SaveCheckpoints | EarlyStopping | ModelCheckpoint)
        for part in parts if known else []:
            name, monitor = type(callback).__name__, part.monitor
            if monitor is None:
                continue
            if isinstance(callback, EarlyStopping) and monitor.startswith("val/") and trainer.limit_val_batches == 0:
                raise UserError(
                    f"EarlyStopping watches {monitor}, but --trainer.limit_val_batches=0 disables validation: "
                    f"remove one of the two, or set its monitor to train/loss"
                )
            higher = task.higher_is_better(monitor)
            if higher is None or part.mode == (mode := "max" if higher else "min"):
                continue
            rank_zero_warn(
                f"{name}: {monitor} is the better the {'higher' if higher else 'lower'} it is, so mode={mode} takes "
                f"the place of mode={part.mode}. Set mode: {mode} to avoid this warning"
            )
            part.mode = mode
            if isinstance(part, EarlyStopping):
                part.min_delta, part.best_score = -part.min_delta, -part.best_score
            elif isinstance(part, ModelCheckpoint):
                part.kth_value = -part.kth_value


def check_processes(trainer: Trainer) -> None:
    """Raises a `UserError` if fewer processes train than devices were requested, or more were started."""
    asked, runs = trainer.num_devices * trainer.num_nodes, trainer.world_size
    started = int(os.environ.get("WORLD_SIZE", 1)) if "TORCHELASTIC_RUN_ID" in os.environ else runs
    if asked <= runs and started <= runs:
        return
    raise UserError(
        f"--trainer.devices={trainer.num_devices} and num_nodes={trainer.num_nodes} ask for {asked} processes, "
        f"{started} are started, and {runs} would train together. {launcher_hint()}"
    )


def check_strategy(strategy: Any) -> None:
    """Raises a `UserError` for a strategy whose checkpoints are folders with a shard per rank."""
    given = strategy if isinstance(strategy, dict) else {"class_path": strategy}
    name, options = str(given["class_path"]).lower(), given.get("init_args") or {}
    shares = name.endswith("modelparallelstrategy") and options.get("save_distributed_checkpoint", True)
    if shares or "deepspeed" in name or options.get("state_dict_type") == "sharded":
        raise UserError(
            f"the checkpoints of --trainer.strategy={name} are folders, which linvit does not read. Whole weights in a "
            f"file are those of FSDPStrategy with state_dict_type: full, as in --config base/strategy/fsdp"
        )


def usable_accelerator(asked: Any = "auto") -> Any:
    """Returns the accelerator of a trainer: "auto" means CUDA devices if available, else the CPU.

    Raises a `UserError` for Apple's GPUs, which Lightning would use. They lack float64, which linvit needs for
    ranks and scores.
    """
    cuda = torch.cuda.is_available()
    if asked == "mps" or (asked == "gpu" and not cuda and torch.backends.mps.is_available()):
        raise UserError(
            f"--trainer.accelerator={asked} is Apple's GPU, which has no float64, in which linvit computes ranks and "
            f"scores: remove the option, or set cpu"
        )
    return asked if asked != "auto" else "cuda" if cuda else "cpu"


def default_precision(accelerator: Any) -> str:
    """Returns `bf16-mixed` on CUDA devices that compute in bfloat16, else `32-true`; prints the choice."""
    cuda = accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    has = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    precision = "bf16-mixed" if has else "32-true"
    rank_zero_info(
        f"precision {precision}, since {'the device has' if has else 'no CUDA device is used that has'} bfloat16; "
        f"--trainer.precision selects another one"
    )
    return precision


class SyncBatchNorm(TorchSyncBatchNorm):
    """Implements `--trainer.sync_batchnorm`. Unlike torch's, it keeps the activation of timm's `BatchNormAct2d`."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Replaces each BatchNorm."""
        return convert_sync_batchnorm(model)  # type: ignore[no-any-return,no-untyped-call]

    def revert(self, model: nn.Module) -> nn.Module:
        """Leaves the model as it is: without other ranks it computes the same as BatchNorm."""
        return model


class SaveRunConfig(Callback):
    """Saves the configuration of a run beside its checkpoints; a resumed run adds a file if an option differs."""

    def __init__(self, text: str, name: str) -> None:
        self.text, self.name = text, name

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Saves atomically before training starts."""
        folder = Path(str(trainer.log_dir))  # all ranks take part in log_dir
        if stage != "fit" or not trainer.is_global_zero:
            return
        (folder / RESULT).unlink(missing_ok=True)  # a resumed run is unfinished until it has ended again
        last = run_config(folder)
        if not last.exists() or _options(last) != _options(self.text):
            folder.mkdir(parents=True, exist_ok=True)  # may replace a folder in which this process has trained
            write_text(folder / self.name, self.text)
            names = [path.name for path in run_configs(folder)]
            for name in names[names.index(self.name) + 1 :]:  # files of later steps, which the run repeats
                (folder / name).unlink()
        for saves in trainer.checkpoint_callbacks:
            if isinstance(saves, SaveCheckpoints):
                saves.config = run_config(folder).name


def _options(given: str | Path) -> Any:
    """Returns the options in a file or text except the checkpoint; None, with a warning, if the file is damaged."""
    try:
        text = yaml_text.read(given) if isinstance(given, Path) else given
        return {**yaml_text.load(text, "the configuration"), "ckpt_path": None}
    except (OSError, UserError, TypeError, yaml.YAMLError) as error:
        rank_zero_warn(f"'{given}' cannot be read and is replaced: {str(error).splitlines()[0]}")
        return None
