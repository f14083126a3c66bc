"""Starts the process of a cell. Imports nothing heavy: a worker of Ray imports it."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from linvit.signals import END_WITH_STDIN

POLL = 0.5  # seconds


def start(command: Sequence[str], log: str, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Starts a process whose output is appended to a file, with more variables than this one has.

    It saves and ends when this process ends, however that comes about: the pipe that is its standard input ends then.
    """
    given = {**os.environ, **environment, END_WITH_STDIN: "1"}
    with open(log, "ab") as file:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=given)


def run(command: Sequence[str], log: str, environment: Mapping[str, str]) -> tuple[int, float]:
    """Runs a process; a KeyboardInterrupt, by which Ray cancels, lets it save. Returns its exit code and seconds."""
    begun = time.monotonic()
    with start(command, log, environment) as process:
        while process.poll() is None:
            try:
                time.sleep(POLL)
            except KeyboardInterrupt:
                process.send_signal(signal.SIGTERM)
    return process.returncode, time.monotonic() - begun
