"""The C library's memory, kept from one step of training to the next."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # numbers of malloc.h
MMAP_FROM = 32 * 2**20  # bytes; the largest that glibc would come to by itself
TRIM_FROM = 2**31 - 1  # the largest that can be said


def keep_memory() -> None:
    """Has glibc keep the memory that tensors leave on a CPU, as torch's allocator does on a GPU.

    glibc hands large free blocks back to the system, which gives them again page by page, each one cleared: a sixth of
    a training step. The most memory that is held at once stays as it is. Other C libraries are left alone.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_FROM)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_FROM)
