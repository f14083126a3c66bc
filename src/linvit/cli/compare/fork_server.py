"""What `linvit.experiments.compare.process.ForkServer` starts: commands of linvit, one after the other, as forks.

Each line of standard input is a command and the file of its log, as JSON; the answer is a line with its exit code.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from contextlib import suppress
from typing import NoReturn

from linvit.signals import SIGNALS


def serve() -> None:
    """Runs commands until standard input ends. Of the signals, SIGTERM is handed on; others come to them, too."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS if number != signal.SIGTERM}
    while line := sys.stdin.readline():
        command, log = json.loads(line)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 2)  # also for what goes wrong here
        importlib.import_module("linvit.cli.training.command_line")
        child = os.fork()
        if child == 0:
            os.dup2(output, 1)
            for number, handler in before.items():
                signal.signal(number, handler)
            _run(command)
        os.close(output)
        signal.signal(signal.SIGTERM, lambda *_, child=child: os.kill(child, signal.SIGTERM))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with suppress(BrokenPipeError):  # nobody asks any more
            os.write(1, f"{code}\n".encode())


def _run(command: list[str]) -> NoReturn:
    """Becomes `linvit COMMAND`, and ends without freeing torch's objects one by one, which would take a second."""
    sys.argv, code = ["linvit", *command], 1
    try:
        runpy.run_module("linvit", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
