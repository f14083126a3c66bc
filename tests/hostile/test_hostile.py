"""Every third hostile file through every door; `python -m tests.hostile.run` tries all, and prints the table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each file is opened in a fork")
@pytest.mark.parametrize("group", ["weights", "data", "annotations", "configurations", "plug-ins", "runs"])
def test_nothing_goes_wrong(group):
    """In a process of its own, since threads do not survive forks."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.hostile.run", "--quick", "--only", group],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.splitlines()[-1].split()[1]) > 5
