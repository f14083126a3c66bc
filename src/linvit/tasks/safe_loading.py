"""How every door opens a checkpoint: by the one reader of pickled files, which runs nothing that is in them.

Lightning reads a file on this machine so, too, unless it is told otherwise; one at an address it unpickles freely.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy

from linvit.errors import UserError, check_choice
from linvit.tasks.old_checkpoints import upgrade
from linvit.weights import torch_file
from linvit.weights.sharded import check_sharded

SCHEMES = ("http", "https", "hf", "s3", "gs", "gcs", "az", "abfs", "abfss")
"""Where a checkpoint may lie besides this machine, if the user names it there."""
FOREIGN = ("hparams", "module_arguments", "hparams_type")  # Lightning takes options from them, and linvit wrote none


@contextmanager
def opened(source: Any) -> Iterator[Path]:
    """A checkpoint as a file or folder here, which holds tensors and plain values alone, under the names of today.

    Args:
        source: A path, an address such as `https://...`, or an open file.

    Raises:
        UserError: If it cannot be read, or is none of a linvit run; see `linvit.weights.torch_file.load`.
    """
    here = isinstance(source, Path) or (isinstance(source, str) and "://" not in source)
    with ExitStack() as stack:  # no folder is made if none is needed: a kill would leave it
        path = Path(source) if here else _temporary(stack)
        if not here:
            _copy(source, path)
        elif path.is_dir():  # of a sharded strategy, which alone can read it
            check_sharded(path)
            yield path
            return
        elif not path.is_file():
            raise UserError(f"there is no checkpoint at '{source}'")
        content = check_content(torch_file.load(path, objects=False), source)
        if upgrade(content):
            path = _temporary(stack)
            torch.save(content, path)
        yield path


def _temporary(stack: ExitStack) -> Path:
    folder = stack.enter_context(TemporaryDirectory(prefix="linvit-", ignore_cleanup_errors=True))
    return Path(folder, "checkpoint.ckpt")


def check_content(content: Any, source: Any) -> dict[str, Any]:
    """The content of a file, if it holds options and weights of a task, and names nothing that is to be called.

    Raises:
        UserError: If it does not.
    """
    if not isinstance(content, dict) or not {"hyper_parameters", "state_dict"} <= content.keys():
        holds = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise UserError(
            f"'{source}' is not a checkpoint of a linvit run: it holds {holds[:200]}, not hyper_parameters and "
            f"state_dict"
        )
    options = content["hyper_parameters"]
    if not isinstance(options, Mapping) or not isinstance(content["state_dict"], Mapping):
        raise UserError(f"'{source}' is not a checkpoint of a linvit run: its options or weights are no mapping")
    foreign = [str(key) for key in options if not isinstance(key, str) or key.startswith("_")]
    foreign += [key for key in FOREIGN if key in content]
    if foreign:
        raise UserError(
            f"'{source}' is not opened: it holds {', '.join(foreign)}, by which a checkpoint names what is to be "
            f"called, and which linvit never writes"
        )
    return content


def only_weights(weights_only: bool | None, source: Any) -> None:
    """Raises a `UserError` if somebody asks for a checkpoint to be unpickled freely."""
    if weights_only is False:
        raise UserError(
            f"linvit opens '{source}' with weights_only=True, and no other way: its own checkpoints need no more. What "
            f"another program wrote, open with torch.load(..., weights_only=False) yourself if you trust it"
        )


def guard(strategy: Strategy, task: LightningModule) -> None:
    """Makes a trainer open checkpoints so while it runs a task, `fit`, `validate`, `test` and `predict` alike."""
    load = getattr(strategy.load_checkpoint, "unguarded", strategy.load_checkpoint)

    def load_checkpoint(checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if strategy.lightning_module is not task:
            return load(checkpoint_path, weights_only)
        only_weights(weights_only, checkpoint_path)
        with opened(checkpoint_path) as file:
            return load(file, True)

    load_checkpoint.unguarded = load  # type: ignore[attr-defined]
    strategy.load_checkpoint = load_checkpoint  # type: ignore[method-assign]


def _copy(source: Any, path: Path) -> None:
    """Writes what lies at an address, or is left of an open file, to a path."""
    if isinstance(source, str):
        check_choice(f"the kind of address of checkpoint '{source}'", source.partition("://")[0], SCHEMES)
    try:
        with fsspec.open(source, "rb") if isinstance(source, str) else source as stream, path.open("wb") as file:
            shutil.copyfileobj(stream, file)
    except Exception as error:  # of as many kinds as there are stores
        raise UserError(f"cannot get the checkpoint '{source}': {type(error).__name__}: {error}") from error
