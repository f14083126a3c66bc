"""Writes and replaces files atomically; reserves folders for one process."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from linvit.errors import UserError
from linvit.io.plain_text import in_shell
from linvit.io.reading import check_regular

LAST, BEST, BEST_AVERAGE = "last.ckpt", "best.ckpt", "best_ema.ckpt"
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in the folder of a run."""

TEMPORARY, LOCK = ".tmp", ".lock"
_locked: dict[Path, BinaryIO] = {}  # folders reserved by this process, and their open lock files


def temporary(path: Path) -> Path:
    """Returns the path where this process prepares a file for `path`: in the same folder, so that a rename suffices."""
    return path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")


def check_new_file(path: Path) -> None:
    """Raises a `UserError` if a path already exists, or if its folder does not or takes no files."""
    if path.exists():
        raise UserError(f"'{path}' exists: name another file, or remove it first")
    if not path.absolute().parent.is_dir():
        raise UserError(f"cannot write '{path.name}': the folder '{path.parent}' does not exist. Create it first")
    check_writable(path.parent, f"the path of '{path.name}'")


def check_writable(folder: Path, option: str = "--trainer.default_root_dir") -> None:
    """Raises a `UserError` unless files can be created in `folder`, which may not exist; `option` sets the folder."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()  # tests the file system, not only the mode of the folder
    except OSError as error:
        raise UserError(
            f"cannot write to the output folder '{folder}': '{existing}': {error.strerror}. Choose another one with "
            f"{option}"
        ) from error


def make_folder(folder: Path) -> None:
    """Creates a folder for reports, and its parents, unless the folder of the run around it was renamed or deleted.

    Raises a `FileNotFoundError` if this process trains the run: nothing is created in place of its folder.
    """
    for run in (folder, *folder.parents):
        if (own := (run / CHECKPOINTS).resolve()) in _locked and not _is_own(own):
            raise FileNotFoundError(errno.ENOENT, "the folder of the run was renamed or deleted", str(run))
    folder.mkdir(parents=True, exist_ok=True)


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Writes a file atomically: it replaces `path` when complete, and nothing remains if writing fails."""
    prepared = temporary(path)
    try:
        with naming(path), prepared.open("wb") as file:
            size = file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if prepared.stat().st_size != size:  # some network file systems report it only here
            raise OSError(errno.EIO, f"only {prepared.stat().st_size} of {size} bytes were written", str(path))
        publish(prepared, path)
    finally:
        prepared.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text atomically."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


@contextmanager
def rewriting(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yields a path, with the same suffix, whose file replaces `path` when the block ends; deleted if the block fails.

    All processes use the same path, so remains of a killed process are overwritten. `durable` waits for the disk.
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
    """Yields a folder to fill, renamed to `folder`, which must be empty or missing, when the block ends.

    It is deleted if the block fails; a kill leaves a hidden folder `.NAME.PROCESS.tmp` beside it.
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
    """Adds path and error number to an `OSError` of writing; errors of an open file and of encoders lack them."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise OSError(errno.EIO, str(error), str(path)) from error
        if error.filename is None or TEMPORARY in str(error.filename):
            error.filename = str(path)
        raise


def publish(prepared: Path, path: Path) -> None:
    """Renames a complete file to `path` and waits for the disk; after a kill the old file or the new one exists."""
    os.replace(prepared, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk. Not possible on Windows."""
    if os.name != "nt":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def link(path: Path, other: Path) -> None:
    """Makes `other` a link to the file `path`, atomically, or a copy where the file system has no links."""
    prepared = temporary(other)
    prepared.unlink(missing_ok=True)
    try:
        os.link(path, prepared)
    except OSError:  # not all file systems have links
        shutil.copyfile(path, prepared)
        sync(prepared)
    try:
        publish(prepared, other)
    finally:
        prepared.unlink(missing_ok=True)  # a rename between two names of one file does nothing


def sweep(folder: Path) -> list[Path]:
    """Deletes unfinished files of dead processes in a folder to which no living process writes; returns their paths."""
    stale = sorted(folder.glob(f".*{TEMPORARY}"))
    for path in stale:
        path.unlink()
    return stale


def lock(folder: Path) -> None:
    """Reserves a folder for this process until it ends for any reason; repeated calls have no effect.

    This is a lock of the operating system: it disappears with the process, and child processes do not inherit it.
    """
    folder = folder.resolve()
    if folder in _locked and _is_own(folder):
        return
    unlock(folder)  # the folder that existed when this process reserved it
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
                f"until it ends, or start a new run: without --resume and --ckpt_path"
            ) from error
    _locked[folder] = file


def is_locked(folder: Path) -> bool:
    """Returns True if another process has reserved a folder."""
    try:
        lock(folder)
    except UserError:
        return True
    unlock(folder)
    return False


def check_reserved(folder: Path, config: str) -> None:
    """Raises a `UserError` if a folder that this process has reserved was moved or deleted.

    The error names the configuration from which to resume, a file beside the folder.
    """
    if not _is_own(folder):
        raise UserError(
            f"'{folder}' was renamed, replaced or deleted while the run trained, so the run ends: its new checkpoints "
            f"could not be resumed. If the folder was deleted, start a new run; otherwise restore its "
            f"name, then resume from its last checkpoint with\n  {resume_command(folder.parent / config)}"
        )


def resume_command(config: Path) -> str:
    """Returns the command that resumes the run of a configuration in its folder."""
    return f"linvit fit --config {in_shell(config)} --resume=auto"


def unlock(folder: Path) -> None:
    """Releases a folder."""
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
