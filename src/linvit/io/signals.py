"""Signals that ask a run to stop: SIGTERM, SIGUSR1, SIGHUP and Ctrl-C.

This module imports no torch, so that signals are caught from the start.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT") if hasattr(signal, name)]
SAME = 1.0  # seconds; launchers and `timeout` pass on a signal that the process group has already received
WORKER_SECONDS = 30  # during which a loader process continues after SIGTERM
END_WITH_STDIN = "LINVIT_END_WITH_STDIN"
"""Variable of a process that stops when its standard input ends: the pipe closes when its parent ends."""
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")  # variables by which launchers number processes


class Stopped(BaseException):
    """Raised to end a run that a signal has stopped, after its state was saved."""

    def __init__(self, by: signal.Signals, step: int) -> None:
        super().__init__(f"ended by {name(by)} at step {step}")
        self.by = by


class StopSignals:
    """Catches the signals that ask this process to stop.

    A thread reads them from a socket to which Python's own handler writes, so that a signal is noticed at once, even
    while the main thread waits in C++ code for another rank.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first one
        self.agreed = False  # True if all ranks know of it
        # True if the run polls for signals and saves. Otherwise, and at a second signal, this process ends at once.
        self.deferred = False
        # Signal that ended the run, after its state was saved. A later one, as from a launcher that ends all ranks when
        # one has ended, does not change the exit code.
        self.ended_by: signal.Signals | None = None
        self.requeue_exit_code = 128 + signal.SIGTERM  # under SLURM, for signals other than Ctrl-C
        self.children: list[subprocess.Popen[Any]] = []  # end with this process
        self._before: dict[int, Any] = {}
        self._descriptor = -1
        self._writer: socket.socket | None = None
        self._noticed = 0.0

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Catches the signals within a block. Ignored signals, as after `nohup`, remain ignored.

        After a signal has arrived, signals stay caught until the process ends.
        """
        self.release()
        self.received = self.ended_by = None
        self.agreed = self.deferred = False
        self.children = []
        if threading.current_thread() is not threading.main_thread():
            yield  # Python has no handlers here
            return
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        caught = [number for number in SIGNALS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
        self._before = {number: signal.getsignal(number) for number in caught}
        self.take_handlers()
        self._descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()
        if os.environ.pop(END_WITH_STDIN, None):
            threading.Thread(target=_stop_with_stdin, name="parent", daemon=True).start()
        try:
            yield
        finally:
            if self.received is None:
                self.release()

    def take_handlers(self) -> None:
        """Installs the handlers of the caught signals again, after a library has replaced them."""
        for number in self._before:
            signal.signal(number, _nothing)

    def agree(self, by: signal.Signals) -> None:
        """Treats a signal that another rank has received as received by this process; all ranks do so together."""
        self.agreed = True
        if self.received is None:
            self.received, self._noticed = by, time.monotonic()

    def release(self) -> None:
        """Restores the previous handlers of the signals, if they are caught."""
        if self._writer is None:
            return
        signal.set_wakeup_fd(self._descriptor)
        while self._before:
            signal.signal(*self._before.popitem())
        self._writer.close()  # which ends the thread
        self._writer = None

    def exit_code(self, by: signal.Signals) -> int:
        """Returns 130 for Ctrl-C, 143 for other signals, or under SLURM `requeue_exit_code`."""
        if by == signal.SIGINT:
            return 128 + signal.SIGINT
        return self.requeue_exit_code if "SLURM_JOB_ID" in os.environ else 128 + signal.SIGTERM

    def is_exit_code(self, code: int) -> bool:
        """Returns True if a rank that a signal has ended may have this exit code."""
        return code in [self.exit_code(by) for by in SIGNALS]

    def exit_now(self, code: int, message: str = "") -> None:
        """Ends this process and its children immediately, without cleaning up, which could wait for another process."""
        if message:
            _say(message)
        for child in self.children:
            child.kill()
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(code)

    def _listen(self, reader: socket.socket) -> None:
        with reader:
            while number := reader.recv(1):
                if number[0] in self._before:
                    self._notice(signal.Signals(number[0]))

    def _notice(self, by: signal.Signals) -> None:
        first = self.received is None
        if first:
            self.received, self._noticed = by, time.monotonic()
        if self.ended_by is not None:
            self.exit_now(self.exit_code(self.ended_by))
        elif not self.deferred:
            self.exit_now(self.exit_code(by), f"ended by {name(by)}")
        elif first:
            _say(f"{name(by)}: the run saves after the current step and ends; a second signal ends it at once")
        elif time.monotonic() - self._noticed > SAME:
            self.exit_now(self.exit_code(by), f"ended at once by a second {name(by)}, without saving")


def name(by: signal.Signals) -> str:
    """Returns the usual name of a signal."""
    return "Ctrl-C" if by == signal.SIGINT else by.name


def ignore_stop_signals(worker: int = 0) -> None:
    """Keeps a loader process alive when a signal reaches all processes of a run, which needs it for one more step."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(WORKER_SECONDS))
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _say(message: str) -> None:
    """Prints a line on rank 0, bypassing Python's buffers, to which the main thread may be writing."""
    if all(os.environ.get(variable, "0") == "0" for variable in RANKS):
        os.write(2, f"\nlinvit: {message}\n".encode())


def _stop_with_stdin() -> None:
    """Raises SIGTERM when standard input ends. Does not use Python's reader, whose lock would outlive a thread."""
    while os.read(0, 1024):
        pass
    signal.raise_signal(signal.SIGTERM)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Does nothing: the thread handles the signal."""


STOP = StopSignals()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=STOP.release)  # signals of a child process are not handled here
