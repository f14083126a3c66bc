"""Memory that is kept from step to step."""

import platform
import subprocess
import sys

import pytest

STEPS = """
import ctypes, sys
from linvit.io.machine import keep_memory

class Mallinfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_int) for name in names.split()]

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
libc.mallinfo.restype = Mallinfo
if sys.argv[1] == "keep":
    keep_memory()
for step in range(8):
    blocks = [libc.malloc(30 * 2**20) for _ in range(5)]
    while blocks:
        libc.free(blocks.pop())
print(libc.mallinfo().fordblks // 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_a_step_leaves_its_memory_to_the_next():
    fresh, kept = (
        int(subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("leave", "keep")
    )
    assert fresh < 100 < 150 <= kept  # MiB that are free and not handed back, of five blocks of 30 MiB
