"""The folder of a run: `checkpoints/CONFIG_NAME/version_N/` with config.yaml, event files and checkpoints/."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from linvit.cli.configs import FOLDER, find
from linvit.errors import UserError

VERSION = re.compile(r"version_\d+")


def run_name(configs: Sequence[str | Path]) -> str:
    """The name of a run: that of its last configuration, whose values win.

    linvit's parts of configurations (`base/...`), which are added to any, give no name. A configuration that lies in
    the folder of a run gives the name of that run.
    """
    if not configs:
        return "unnamed"
    parts = FOLDER / "base"
    last = next((c for c in reversed(configs) if not _file(c).is_relative_to(parts)), configs[-1])
    folder = Path(last).absolute().parent
    return folder.parent.name if VERSION.fullmatch(folder.name) else Path(last).stem


def _file(config: str | Path) -> Path:
    """Where a configuration lies, as far as that is known."""
    return (find(str(config)) or Path(config)).resolve()


def run_of_checkpoint(checkpoint: str | Path) -> Path | None:
    """The run folder `.../NAME/version_N` that a checkpoint lies in, or None if it lies elsewhere."""
    folder = Path(checkpoint).absolute().parent.parent
    return folder if VERSION.fullmatch(folder.name) else None


def check_writable(folder: Path) -> None:
    """Raises a `UserError` unless files can be made in `folder`, which is not created yet."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "may not be written to" if existing.is_dir() else "is a file"
        raise UserError(
            f"cannot write to the output folder '{folder}': '{existing}' {reason}. "
            f"Choose another one with --trainer.default_root_dir"
        )
