"""Folders that only one process at a time saves checkpoints to."""

import errno
import os
from pathlib import Path
from typing import BinaryIO

from linvit.errors import UserError

NAME = ".lock"
_held: dict[Path, BinaryIO] = {}  # folders of this process, and the open lock files


def lock(folder: Path) -> None:
    """Reserves a folder for this process, until it ends in whatever way; once more does no harm.

    The lock is the operating system's, on an empty file in the folder: it needs no clearing up after a kill, and a
    child process does not inherit it. Where a file system has no locks, nothing is reserved.

    Raises:
        UserError: If a living process, on whichever machine, has the folder.
    """
    folder = folder.resolve()
    if folder in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / NAME).open("ab")
    try:
        _take(file)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            file.close()
            raise UserError(
                f"another process saves its checkpoints to '{folder}', perhaps the same run on another machine. Wait "
                f"for its end, or start a run of its own: without --resume and --ckpt_path"
            ) from error
    _held[folder] = file


def unlock(folder: Path) -> None:
    """Gives a folder back."""
    file = _held.pop(folder.resolve(), None)
    if file is not None:
        file.close()


def _take(file: BinaryIO) -> None:
    if os.name == "nt":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
