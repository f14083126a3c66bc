"""Forks for each program that a line of its input names, so that torch and linvit are imported once for all of them.

A line is a JSON list of the file of calls, the file of what is printed, and the module with its arguments; the answer
is a line with the exit code. `device.Server` starts it, with the library of device.py preloaded.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence

from benchmarks import recipe_memory
from tests.null_cuda import layers, rehearse

MODULES = {"rehearse": rehearse, "layers": layers, "memory": recipe_memory}


def child(calls: str, output: str, module: str, arguments: Sequence[str]) -> int:
    """Runs a module with arguments; returns its exit code."""
    for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(output, os.O_WRONLY | os.O_CREAT))):
        os.dup2(file, number)
    os.dup2(1, 2)
    os.environ["CALLS"], sys.argv = calls, [module, *arguments]
    try:
        return MODULES[module].main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1


def main() -> None:
    """Answers until the input ends."""
    for line in sys.stdin:
        calls, output, module, *arguments = json.loads(line)
        if (pid := os.fork()) == 0:
            status = child(calls, output, module, arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)  # a thread of autograd that still wants the interpreter would abort the process
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
