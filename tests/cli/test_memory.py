"""Memory that is kept from step to step."""

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys, torch
from linvit.cli.memory import keep_memory
if sys.argv[1] == "keep":
    keep_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(30 * 2**18) for _ in range(5)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

warm_up = [faults() for _ in range(8)]
print(sum(faults() for _ in range(4)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_steps_get_the_pages_of_those_before():
    fresh, kept = (
        int(subprocess.run([sys.executable, "-c", STEPS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("leave", "keep")
    )
    assert kept < 1_000 < 50_000 < fresh  # of 4 steps * 150 MiB / 4 KiB = 153,600 pages
