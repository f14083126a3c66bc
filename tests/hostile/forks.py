"""Runs calls in forks of this process, and keeps what became of each: code that ran, requests, time, memory, words."""

import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from linvit import UserError
from linvit.io.plain_text import printable

SECONDS = 10.0  # of a processor that any call may take
BYTES = 2e9  # of memory that any call may take


class Outcome(NamedTuple):
    """What became of a call.

    Attributes:
        end: "refused" (a `UserError`, or exit code 2), "done", "traceback", "killed" (by a signal) or "hang".
        executed: Whether what the file wanted to run was run.
        requests: Requests that nobody asked for.
        seconds: Of the processor, so that other programs do not count; a call that waits for ever is a "hang".
        bytes: Largest resident memory, that of the imported libraries included.
        escapes: Whether control characters reached the terminal.
        output: What it printed.
    """

    end: str
    executed: bool
    requests: list[str]
    seconds: float
    bytes: float
    escapes: bool
    output: str

    @property
    def wrong(self) -> list[str]:
        """What must not be."""
        found = {
            "executed": self.executed,
            "requests": bool(self.requests),
            "hang": self.end == "hang" or self.seconds > SECONDS,
            "traceback": self.end in ("traceback", "killed"),
            "memory": self.bytes > BYTES,
            "escapes": self.escapes,
        }
        return [name for name, is_so in found.items() if is_so]


def attempt(call: Callable[[], object], mark: Path, asked: list[str], allowed: str = "", limit: float = 60) -> Outcome:
    """Runs a call in a fork, within a new folder.

    Args:
        call: Ends with an exit code, or raises.
        mark: The file that code leaves behind which is run.
        asked: The requests that the server has had.
        allowed: The request that the call is meant to make.
        limit: Seconds on the clock after which it is killed.
    """
    mark.unlink(missing_ok=True)
    asked.clear()
    folder = Path(tempfile.mkdtemp(prefix="linvit-hostile-"))
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _run(call, folder)
    status, usage = None, None
    while status is None and time.monotonic() - started < limit:
        pid, found, usage = os.wait4(child, os.WNOHANG)
        status = found if pid else None
        time.sleep(0.005)
    hang = status is None
    if hang:
        os.killpg(child, signal.SIGKILL)
        _, status, usage = os.wait4(child, 0)
    output = (folder / "output").read_text(encoding="utf-8", errors="replace")
    code = os.waitstatus_to_exitcode(status)
    end = "hang" if hang else "killed" if code < 0 else {2: "refused", 70: "traceback"}.get(code, "done")
    if "Traceback (most recent call last)" in output and not hang:
        end = "traceback"
    shutil.rmtree(folder, ignore_errors=True)
    said = re.sub(r"\x1b\[A|\r", "", output)  # progress bars
    return Outcome(
        end,
        mark.exists(),
        [request for request in asked if request != allowed],
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        said != printable(said),
        output,
    )


def _run(call: Callable[[], object], folder: Path) -> None:
    """The child: its exit code is that of the call, 2 for what the user can fix, 70 for any other exception."""
    code: object = 70
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        descriptor = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.chdir(folder)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        code = call() or 0
    except SystemExit as stop:
        code = stop.code or 0
    except UserError as error:
        print(f"UserError: {error}")
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
