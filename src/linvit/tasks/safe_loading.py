"""Opens checkpoints with linvit's reader of pickled files, which executes nothing in them.

Lightning does so with files on this machine unless it is told otherwise, and unpickles one at an address freely.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import fsspec
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from linvit.errors import UserError, check_choice, quote_first
from linvit.finite import not_finite
from linvit.registry.entries import restrict_imports_to
from linvit.registry.removed import without_removed
from linvit.tasks.optimisation import total_batch_size
from linvit.tasks.pretrained import skip_pretrained
from linvit.weights import torch_file

SCHEMES = ("http", "https", "hf", "s3", "gs", "gcs", "az", "abfs", "abfss")
"""Schemes of remote checkpoints, allowed if the user gives such an address."""
FOREIGN = ("hparams", "module_arguments", "hparams_type")  # Lightning takes options from them, and linvit wrote none
VERSION = "pytorch-lightning_version"
OF_RESUMING = ("epoch", "global_step", "optimizer_states", "lr_schedulers", "loops")
OF_TRAINING = ("callbacks", "loops", "optimizer_states", "lr_schedulers", "MixedPrecision")  # scoring needs none
YAML = re.compile(r"[{\[]|:(\s|$)")  # text that a parser of configurations may take for a list or a mapping


@contextmanager
def opened(source: Any, resumed: bool = False) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields a checked checkpoint as a file on this machine, and its options; see `check_content`."""
    with ExitStack() as stack:  # no folder is made if none is needed: a kill would leave it
        if isinstance(source, Path) or (isinstance(source, str) and "://" not in source):
            path = Path(source)
        else:
            folder = stack.enter_context(TemporaryDirectory(prefix="linvit-", ignore_cleanup_errors=True))
            path = Path(folder, "checkpoint.ckpt")
            if isinstance(source, str):
                check_choice(f"the kind of address of checkpoint '{source}'", source.partition("://")[0], SCHEMES)
            try:
                given = fsspec.open(source, "rb") if isinstance(source, str) else source  # else an open file
                with given as stream, path.open("wb") as file:
                    shutil.copyfileobj(stream, file)
            except Exception as error:  # of as many kinds as there are stores
                raise UserError(f"cannot get the checkpoint '{source}': {type(error).__name__}: {error}") from error
        if not path.is_file():
            raise UserError(f"checkpoint '{source}' does not exist")
        yield path, check_content(torch_file.load(path, objects=False), source, resumed)["hyper_parameters"]


def check_content(content: Any, source: Any, resumed: bool = False) -> dict[str, Any]:
    """Returns the content of a file with a task's options and weights, without removed options.

    Raises:
        UserError: It names something to be called, or lacks entries that a task (`resumed`: a run) needs.
    """
    if not isinstance(content, dict) or not {"hyper_parameters", "state_dict"} <= content.keys():
        holds = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise UserError(
            f"'{source}' is not a checkpoint of a linvit run: it holds {holds[:200]}, not hyper_parameters and "
            f"state_dict"
        )
    options = content["hyper_parameters"]
    if not isinstance(options, Mapping) or not isinstance(content["state_dict"], Mapping):
        raise UserError(f"'{source}' is not a checkpoint of a linvit run: its options or weights are not a mapping")
    foreign = [str(key) for key in options if not isinstance(key, str) or key.startswith("_")]
    foreign += [key for key in FOREIGN if key in content]
    if foreign:
        raise UserError(
            f"'{source}' is not opened: it holds {', '.join(foreign)}, by which a checkpoint names what is to be "
            f"called, and which linvit never writes"
        )
    for name, value in options.items():
        try:
            reason = not_plain(value, text=name not in ("class_names", "pretrained"))
        except RecursionError:
            reason = "lists and mappings without an end"
        if reason:
            raise UserError(f"'{source}' is not opened: its option '{name}' holds {reason}, which linvit never writes")
    if not re.fullmatch(r"[2-9]\.\d[\w.+]*", str(content.get(VERSION))):
        raise UserError(f"'{source}' is not a checkpoint of a linvit run: it has no {VERSION} from 2.0 on")
    if missing := [part for part in OF_RESUMING if resumed and part not in content]:
        raise UserError(f"'{source}' cannot be resumed: it has no {', '.join(missing)}, but weights alone")
    return {**content, "hyper_parameters": without_removed(options, f"'{source}'", "model")}


def not_plain(value: Any, text: bool = False) -> str | None:
    """Returns the part of an option that is no plain value, or may be parsed as a class (`text`: also in text)."""
    if isinstance(value, Mapping | list | tuple):
        if isinstance(value, Mapping) and not value.keys().isdisjoint(("class_path", "init_args")):
            return "a class_path or init_args, which name what is to be called"
        parts = value.values() if isinstance(value, Mapping) else value
        within = text or isinstance(value, Mapping)  # class_names are a list of any text
        return next((reason for part in parts if (reason := not_plain(part, within))), None)
    if isinstance(value, str):
        return f"{value[:80]!r}, which reads as a list or a mapping" if text and YAML.search(value) else None
    return None if isinstance(value, bool | int | float | None) else f"a {type(value).__name__}"


def only_weights(weights_only: bool | None, source: Any) -> None:
    """Raises a `UserError` for `weights_only=False`, which would unpickle a checkpoint freely."""
    if weights_only is False:
        raise UserError(
            f"linvit opens '{source}' with weights_only=True, and no other way: its own checkpoints need no more. What "
            f"another program wrote, open with torch.load(..., weights_only=False) yourself if you trust it"
        )


def force_safe_loading(strategy: Strategy, task: LightningModule) -> None:
    """Makes a trainer open checkpoints so while it runs a task, `fit`, `validate`, `test` and `predict` alike."""
    load = getattr(strategy.load_checkpoint, "unguarded", strategy.load_checkpoint)

    def load_checkpoint(checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if strategy.lightning_module is not task:
            return load(checkpoint_path, weights_only)
        only_weights(weights_only, checkpoint_path)
        if "://" in str(checkpoint_path) and isinstance(strategy, FSDPStrategy | ModelParallelStrategy):
            raise UserError(
                f"{type(strategy).__name__} reads a checkpoint from one path on all ranks: get "
                f"'{checkpoint_path}' first, to a folder that they share"
            )
        resumed = task.trainer.state.fn == TrainerFn.FITTING
        with opened(checkpoint_path, resumed) as (file, _):
            content: dict[str, Any] = load(file, True)  # FSDP hands the weights to its model, and leaves them out here
        if not resumed:
            return {name: part for name, part in content.items() if name not in OF_TRAINING}
        for callback in task.trainer.checkpoint_callbacks:
            state = content.get("callbacks", {}).get(callback.state_key)
            if isinstance(callback, ModelCheckpoint) and state is not None and not names_own_files(callback, state):
                rank_zero_warn(f"{callback.state_key} starts without its state: it names files out of its folder")
                del content["callbacks"][callback.state_key]
        return content

    load_checkpoint.unguarded = load  # type: ignore[attr-defined]
    strategy.load_checkpoint = load_checkpoint  # type: ignore[method-assign]


def names_own_files(callback: ModelCheckpoint, state: Any) -> bool:
    """True if a state of Lightning's callback names only files in its folder: it deletes named files."""
    try:
        names = ("best_model_path", "last_model_path", "kth_best_model_path")
        paths = [*state["best_k_models"], *(state[name] for name in names)]
        folders = {Path(path).resolve().parent for path in paths if path}
        checkpoints = all(path.endswith(callback.FILE_EXTENSION) for path in paths if path)
    except (AttributeError, KeyError, TypeError, ValueError):
        return False
    return checkpoints and folders <= {Path(str(callback.dirpath)).resolve()}


def epochs_done(content: Mapping[str, Any]) -> int:
    """Returns the number of epochs that a run had finished; 0 if Lightning's entries are missing."""
    try:
        return int(content["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"])
    except (KeyError, TypeError, ValueError):
        return 0


def stopped_early(content: Mapping[str, Any]) -> bool:
    """True if Lightning's `EarlyStopping` has ended the run."""
    states = [own for name, own in content.get("callbacks", {}).items() if str(name).startswith("EarlyStopping")]
    return any(own.get("stopped_epoch") or own.get("stopping_reason_message") for own in states)  # also within epoch 0


def within_validation(content: Mapping[str, Any]) -> bool:
    """True if a validation was due or had begun, and had not ended; `ExactResume` marks it so."""
    try:
        batches = content["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["current"]
        return bool(batches["completed"] < batches["started"])
    except (KeyError, TypeError):
        return False


DESCRIPTION = "linvit"
"""Key of a checkpoint's metadata besides its options: linvit's version, the class of the task, and `OF_DATA`."""
OF_DATA = ("preprocessing", "category_ids")
"""Properties of the data that prediction needs: the preprocessing, and for detection COCO's ids of the classes."""


def are_category_ids(value: Any, num_classes: Any) -> bool:
    """True if a value from a file is a list of whole numbers, one for each class."""
    return isinstance(value, list) and len(value) == num_classes and {*map(type, value)} <= {int}


class SavedTask(LightningModule):
    """Metadata of a task's checkpoint, and opening of a checkpoint in Python."""

    ema: Any
    category_ids: list[int] | None = None  # COCO's, of the data that the checkpoint was trained on

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what prediction needs besides the weights, the total batch size, and updates of the moving average."""
        # of what rank 0 writes, which alone has the weights under FSDP: all end, or the others would wait for it
        if bad := self.trainer.strategy.broadcast(not_finite(self, checkpoint)):
            raise UserError(
                f"the model is not finite at step {self.trainer.global_step}, so it is not saved, and the checkpoints "
                f"before it are kept: {quote_first(bad, 3)}. Lower --model.lr, or set --trainer.gradient_clip_val=1"
            )
        own = type(self)
        checkpoint[DESCRIPTION] = {
            "version": version("linvit"),
            "task": f"{own.__module__}:{own.__qualname__}",
            **{name: getattr(self.trainer.datamodule, name, None) for name in OF_DATA},  # type: ignore[attr-defined]
        }
        checkpoint["total_batch"] = total_batch_size(self.trainer)
        if self.ema is not None:
            checkpoint["ema_updates"] = self.ema.updates

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes over what `on_save_checkpoint` added."""
        self._trained_with = checkpoint.get("total_batch")
        known = checkpoint.get(DESCRIPTION)
        ids = known.get("category_ids") if isinstance(known, Mapping) else None
        self.category_ids = ids if are_category_ids(ids, self.hparams.get("num_classes")) else None
        if self.ema is not None:
            self.ema.updates = checkpoint["ema_updates"]

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: Any,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **options: Any,
    ) -> Self:
        """Does the same as Lightning's, but nothing in a checkpoint is executed or imported, wherever it is stored.

        `pretrained` is not loaded: the checkpoint has the weights, and that file may be gone. A class that the
        checkpoint names by its path ("package.module:Class") is imported only if `options` name it as well.

        Raises:
            UserError: If it cannot be read, or names a class that `options` do not; or for `weights_only=False`.
        """
        only_weights(weights_only, checkpoint_path)
        with skip_pretrained(), restrict_imports_to(options), opened(checkpoint_path) as (file, _):
            return super().load_from_checkpoint(file, map_location, hparams_file, strict, True, **options)
