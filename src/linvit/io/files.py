"""Files that appear whole or not at all, and replace others in one operation; folders with one owner."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from linvit.errors import UserError
from linvit.io.plain_text import in_shell
from linvit.io.reading import check_regular

LAST, BEST, BEST_AVERAGE = "last.ckpt", "best.ckpt", "best_ema.ckpt"
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in that of a run."""

TEMPORARY, LOCK = ".tmp", ".lock"
_locked: dict[Path, BinaryIO] = {}  # folders of this process, and the open lock files


def temporary(path: Path) -> Path:
    """Where this process prepares what will lie at `path`: beside it, on the same disk, so that a rename is enough."""
    return path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")


def check_new_file(path: Path) -> None:
    """Raises a `UserError` if there is something at a path already, or no folder for it."""
    if path.exists():
        raise UserError(f"'{path}' exists: name another file, or remove it first")
    if not path.absolute().parent.is_dir():
        raise UserError(f"there is no folder '{path.parent}' to write '{path.name}' to. Make it first")


def make_folder(folder: Path) -> None:
    """Makes a folder for reports, and its parents, unless the folder of the run around it was renamed or deleted.

    Raises a `FileNotFoundError` if this process trains the run: nothing is made in place of its folder.
    """
    for run in (folder, *folder.parents):
        if (own := (run / CHECKPOINTS).resolve()) in _locked and not _is_own(own):
            raise FileNotFoundError(errno.ENOENT, "the folder of the run was renamed or deleted", str(run))
    folder.mkdir(parents=True, exist_ok=True)


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Writes a file whole or not at all; it takes the place of `path`, and nothing is left of one that fails."""
    prepared = temporary(path)
    try:
        with naming(path), prepared.open("wb") as file:
            size = file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if prepared.stat().st_size != size:  # some network file systems say so only here
            raise OSError(errno.EIO, f"only {prepared.stat().st_size} of {size} bytes were written", str(path))
        publish(prepared, path)
    finally:
        prepared.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text whole or not at all."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


@contextmanager
def rewriting(path: Path, durable: bool = True) -> Iterator[Path]:
    """Path to write what replaces `path` when the block ends, of the same suffix; nothing is left if the block fails.

    It is the same for all processes, so that what a kill leaves is reused. `durable` waits until the disk has it.
    """
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        with naming(path):
            yield part
            if durable:
                sync(part)
            os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Folder to fill, which gets the name of a `folder` that is empty or missing when the block ends.

    Nothing is left if the block fails; a kill leaves a hidden folder `.NAME.PROCESS.tmp` beside it.
    """
    prepared = temporary(folder.absolute())
    try:
        with naming(folder):
            prepared.mkdir(parents=True)
            yield prepared
            if folder.exists():
                folder.rmdir()
            os.replace(prepared, folder)
    except BaseException:
        shutil.rmtree(prepared, ignore_errors=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an `OSError` of writing the path and a number, which errors of an open file and of encoders do not have."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise OSError(errno.EIO, str(error), str(path)) from error
        if error.filename is None or TEMPORARY in str(error.filename):
            error.filename = str(path)
        raise


def publish(prepared: Path, path: Path) -> None:
    """Renames a complete file to `path`, and waits until the disk has it; a kill leaves the old one or the new one."""
    os.replace(prepared, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until the disk has a file, or the names in a folder. Windows cannot be asked to."""
    if os.name != "nt":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def link(path: Path, other: Path) -> None:
    """Makes `other` the same file as `path`, in one operation; where a file system has no links, a copy."""
    prepared = temporary(other)
    prepared.unlink(missing_ok=True)
    try:
        os.link(path, prepared)
    except OSError:  # not every file system has links
        shutil.copyfile(path, prepared)
        sync(prepared)
    try:
        publish(prepared, other)
    finally:
        prepared.unlink(missing_ok=True)  # a rename between two names of one file does nothing


def sweep(folder: Path) -> list[Path]:
    """Deletes what dead processes left unfinished in a folder that no living one writes to; returns what it was."""
    stale = sorted(folder.glob(f".*{TEMPORARY}"))
    for path in stale:
        path.unlink()
    return stale


def lock(folder: Path) -> None:
    """Reserves a folder for this process, until it ends, however that comes about; once more does no harm.

    The lock is the operating system's: it needs no clearing up after a kill, and a child process does not inherit it.
    """
    folder = folder.resolve()
    if folder in _locked and _is_own(folder):
        return
    unlock(folder)  # the one that was there when this process reserved it
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / LOCK).exists():
        check_regular(folder / LOCK)
    file = (folder / LOCK).open("ab")
    try:
        _take(file)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            file.close()
            raise UserError(
                f"another process saves its checkpoints to '{folder}', perhaps the same run on another machine. Wait "
                f"for its end, or start a run of its own: without --resume and --ckpt_path"
            ) from error
    _locked[folder] = file


def is_locked(folder: Path) -> bool:
    """Whether another process has reserved a folder."""
    try:
        lock(folder)
    except UserError:
        return True
    unlock(folder)
    return False


def check_reserved(folder: Path, config: str) -> None:
    """Raises a `UserError` unless a folder that this process has reserved is still where it was.

    It names the configuration from which the run is continued, a file beside the folder.
    """
    if not _is_own(folder):
        raise UserError(
            f"'{folder}' was renamed, replaced or deleted while the run trained, so the run ends: it could not be "
            f"resumed from what it saves now. If the folder was deleted, start a new run; if not, give it back its "
            f"name, then continue from its last checkpoint with\n  {resume_command(folder.parent / config)}"
        )


def resume_command(config: Path) -> str:
    """Returns the command that resumes the run of a configuration in its folder."""
    return f"linvit fit --config {in_shell(config)} --resume=auto"


def unlock(folder: Path) -> None:
    """Gives a folder back."""
    file = _locked.pop(folder.resolve(), None)
    if file is not None:
        file.close()


def _is_own(folder: Path) -> bool:
    file = _locked.get(folder.resolve())
    try:
        return file is not None and os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat())
    except OSError:
        return False


def _take(file: BinaryIO) -> None:
    if os.name == "nt":
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    else:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
