"""Reads whole files: only regular files up to a given size, no pipes or devices."""

import errno
import os
import stat

MOST = 2**33
"""Default limit in bytes: more than the annotations of any published dataset have."""


def read_regular(path: str | os.PathLike[str], most: int | None = MOST, size: int = -1) -> bytes:
    """Reads a file of at most `most` bytes, or its first `size` bytes.

    Raises:
        OSError: As `check_regular` does, or if the file cannot be read.
    """
    check_regular(path, most)
    with open(path, "rb", opener=_not_waiting) as file:
        check_regular(file.fileno(), most)  # the file may have been replaced since
        content = file.read(size)
    return content


def read_start(path: str | os.PathLike[str], size: int) -> bytes:
    """Reads the first `size` bytes of a regular file of any size; raises an `OSError` as `read_regular` does."""
    return read_regular(path, None, size)


def read_text(path: str | os.PathLike[str], most: int = MOST, errors: str = "strict") -> str:
    """Reads a UTF-8 text as `read_regular` does."""
    return read_regular(path, most).decode(errors=errors)


def check_regular(path: str | os.PathLike[str] | int, most: int | None = None) -> None:
    """Raises an `OSError` unless a file, links followed, is a regular one of at most `most` bytes.

    Pipes and devices may be endless, and opening them may block forever.
    """
    found, name = os.stat(path), path if isinstance(path, int) else os.fspath(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", name)
    if most is not None and found.st_size > most:
        raise OSError(errno.EFBIG, f"{found.st_size:,} bytes are more than {most:,}", name)


def _not_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
