"""The folder of a run: `checkpoints/CONFIG_NAME/version_N/` with config.yaml, event files and checkpoints/."""

import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from linvit.errors import UserError
from linvit.runs.configs import FOLDER, find

CHECKPOINTS = "checkpoints"  # within it
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


def run_of_config(configs: Sequence[str | Path]) -> Path | None:
    """The run folder that the last configuration lies in, or None if it lies elsewhere."""
    folder = Path(configs[-1]).absolute().parent if configs else Path()
    return folder if VERSION.fullmatch(folder.name) else None


def versions(folder: Path) -> list[Path]:
    """The run folders `version_N` in a folder, by number."""
    found = [path for path in folder.glob("version_*") if VERSION.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_number)


def next_version(folder: Path) -> int:
    """The number of the next run in a folder."""
    return max(map(_number, versions(folder)), default=-1) + 1


def claim_version(folder: Path) -> int:
    """Makes the folder of the next run, which no other process that starts at the same moment gets; its number."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        number = next_version(folder)
        with suppress(FileExistsError):
            (folder / f"version_{number}").mkdir()
            return number


def _number(version: Path) -> int:
    return int(version.name.removeprefix("version_"))


def _file(config: str | Path) -> Path:
    """Where a configuration lies, as far as that is known."""
    return (find(str(config)) or Path(config)).resolve()


def run_of_checkpoint(checkpoint: str | Path) -> Path | None:
    """The run folder `.../NAME/version_N` that a checkpoint is or lies in, or None if it lies elsewhere."""
    path = Path(checkpoint).absolute()
    folder = path if (path / CHECKPOINTS).is_dir() else path.parent.parent
    return folder if VERSION.fullmatch(folder.name) else None


def check_writable(folder: Path) -> None:
    """Raises a `UserError` unless files can be made in `folder`, which is not created yet."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):  # what the file system allows, and not only the mode of the folder
            return
    except NotADirectoryError:
        reason = "is a file"
    except OSError as error:
        reason = f"may not be written to ({error.strerror})"
    raise UserError(
        f"cannot write to the output folder '{folder}': '{existing}' {reason}. "
        f"Choose another one with --trainer.default_root_dir"
    )


def shown(path: Path) -> Path:
    """A path relative to the current folder if it lies in it."""
    absolute = path.absolute()
    return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute
