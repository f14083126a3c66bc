"""Starts the process of a run. Imports nothing heavy: a worker of Ray or SLURM imports it."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from linvit.io.signals import END_WITH_STDIN

POLL = 0.5  # seconds


def start(command: Sequence[str], log: str, environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Starts a process whose output is appended to a file; it saves and ends when this one, and so its stdin, ends."""
    given = {**os.environ, **environment, END_WITH_STDIN: "1"}
    with open(log, "ab") as file:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=given)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Lets a process that `start` has started save and end. Windows' SIGTERM would kill it."""
    if os.name == "nt" and process.stdin is not None:
        process.stdin.close()
    else:
        process.terminate()


class ProcessJob:
    """The process of a run as a job of submitit or task of Ray, whose KeyboardInterrupt lets it save."""

    process: "subprocess.Popen[bytes] | None" = None

    def __call__(self, command: Sequence[str], log: str, environment: Mapping[str, str]) -> tuple[int, float]:
        """Runs the process to its end; returns its exit code and seconds."""
        begun = time.monotonic()
        with start(command, log, environment) as self.process:
            while self.process.poll() is None:
                try:
                    time.sleep(POLL)
                except KeyboardInterrupt:
                    stop(self.process)
        return self.process.returncode, time.monotonic() - begun

    def checkpoint(self, *arguments: Any) -> Any:
        """Lets the run save when the time of its job is over or another takes its place; it resumes in a later job."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None:
            stop(self.process)
            self.process.wait()
        return DelayedSubmission(ProcessJob(), *arguments)
