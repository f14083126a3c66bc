"""Processors, memory and disk of the machine, or of the container that this process runs in."""

import ctypes
import os
import platform
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from linvit.errors import UserError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
MEMORY = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")


def cpus() -> float:
    """Returns the number of processors that this process may use, or the CPU time of its container if that is less."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = (_read(group / "cpu.max").split() for group in _groups())  # microseconds per period
    return min([usable, *(float(given[0]) / float(given[1]) for given in granted if given[:1] not in ([], ["max"]))])


def has_compiler() -> bool:
    """Returns True if there is a C++ compiler, which `torch.compile` needs on a CPU."""
    return "CXX" in os.environ or any(map(shutil.which, ("g++", "clang++", "cl")))


def memory() -> tuple[int, int] | None:
    """Returns the bytes of total and free memory, within the limits of the container; None if unknown."""
    found = {}
    for line in _read(MEMORY).splitlines():
        name, _, amount = line.partition(":")
        found[name] = amount.split()[0]
    if not {"MemTotal", "MemAvailable"} <= found.keys():
        return None
    total, free = (int(found[name]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for group in _groups():
        limit, used = _read(group / "memory.max"), _read(group / "memory.current")
        if limit.isdigit() and used.isdigit() and int(limit) < total:
            total, free = int(limit), min(free, int(limit) - int(used))
    return total, max(free, 0)


def largest_resident_set() -> int | None:
    """Returns the peak memory of this process in bytes; None where the system does not report it, as on Windows."""
    if resource is None:
        return None
    unit = 1 if platform.system() == "Darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def memory_limit(share: float = 0.8) -> Iterator[None]:
    """Limits this process to a share of the free memory, on Linux, so that exceeding it is an error, not a kill."""
    free, used = memory(), re.search(r"VmData:\s*(\d+)", _read(STATUS))
    if resource is None or free is None or used is None:
        yield
        return
    before, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(used[1]) * 1024 + int(share * free[1])
    resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *(x for x in (before, most) if x >= 0)]), most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (before, most))


def _groups() -> Iterator[Path]:
    """Yields the folders of the control groups (version 2) that contain this process, from its own up to the root."""
    for line in _read(OWN_GROUPS).splitlines():
        if line.startswith("0::"):
            own = GROUPS / line[3:].strip("/")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(GROUPS))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


MOST_OPEN = 2**16  # files; more would be slow, since programs that this process starts may close each number


def let_open(files: int, what: str, way_out: str) -> None:
    """Raises this process's limit of open files as far as the system allows, up to `MOST_OPEN`.

    The number that a loader needs depends on its batches: each tensor of a list, as in detection, needs an open file.

    Raises:
        UserError: If the limit cannot be raised to `files`, the minimum.
    """
    if resource is None:
        return
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < files:
        raise UserError(
            f"this process may open {most} files at once, and {what} need up to {files}: {way_out} raise the limit "
            f"before the command, by ulimit -n {files}"
        )
    for limit in (MOST_OPEN if most == resource.RLIM_INFINITY else min(most, MOST_OPEN), files):
        if now == resource.RLIM_INFINITY or now >= limit:
            return
        with suppress(ValueError, OSError):  # macOS allows fewer than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
            return


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as in malloc.h
MMAP_FROM = 32 * 2**20  # bytes; the largest value that glibc would choose itself
TRIM_FROM = 2**31 - 1  # the largest int


def keep_memory() -> None:
    """Makes glibc keep the memory of freed tensors on a CPU, as torch's allocator does on a GPU.

    By default glibc returns large free blocks, and the system clears them page by page when they are needed again: it
    took a sixth of a training step. The peak of memory does not change.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_FROM)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_FROM)
