"""Starts the process of a run. Imports nothing heavy: a worker of Ray or SLURM imports it."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from linvit.signals import END_WITH_STDIN, STOP

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


class ForkServer:
    """A process that runs commands of linvit, one after the other, as forks of itself: torch is imported once for all.

    That takes 3 of the 15 seconds of a short run. It is to its runs what `subprocess.Popen` is to one.
    """

    returncode: int | None = None

    def __init__(self, environment: Mapping[str, str]) -> None:
        given = {**os.environ, **environment, END_WITH_STDIN: "1"}
        command = [sys.executable, "-m", "linvit.cli.compare.fork_server"]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=given, text=True)
        STOP.children.append(self._server)

    @property
    def lives(self) -> bool:
        """Whether it can run a command."""
        return self._server.poll() is None

    def run(self, arguments: Sequence[str], log: str) -> "ForkServer":
        """Starts `linvit ARGUMENTS`, whose output is appended to a file; see `start`."""
        assert self._server.stdin is not None
        print(json.dumps([[*arguments], log]), file=self._server.stdin, flush=True)
        self.returncode = None
        return self

    def poll(self) -> int | None:
        """The exit code of the command, or of this process if that has ended; None while they run."""
        answers = self._server.stdout
        if self.returncode is None and answers is not None and select.select([answers], [], [], 0)[0]:
            self.returncode = int(answers.readline() or self._server.wait())
        return self.returncode

    def terminate(self) -> None:
        """Lets the command save and end."""
        self._server.terminate()

    def close(self) -> None:
        """Ends it when the command has ended."""
        self._server.communicate()


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
