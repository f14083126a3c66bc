"""Where a run lives: `checkpoints/CONFIG_NAME/version_N/` with config.yaml, event files and checkpoints/."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from linvit.errors import UserError

VERSION = re.compile(r"version_\d+")


def run_name(configs: Sequence[str | Path]) -> str:
    """The name of a run: its first config file's, or the original name if that file is itself from a run folder."""
    if not configs:
        return "unnamed"
    folder = Path(configs[0]).absolute().parent
    return folder.parent.name if VERSION.fullmatch(folder.name) else Path(configs[0]).stem


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
