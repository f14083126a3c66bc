"""Runs the command line in processes that are forked from this one, so that each starts in a second, not in ten.

They stand for those of a shell, of torchrun, or of Lightning, which starts all ranks but the first.
"""

import atexit
import faulthandler
import logging
import multiprocessing.util
import os
import signal
import socket
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from linvit.cli import main
from tests.cli.runs import undrawn

# autograd starts its threads for devices at its first backward pass; after torch.compile it would find some, and would
# refuse to run in a fork
torch.ones(1, requires_grad=True).sum().backward()

DEADLINE = 60.0  # seconds in which all processes of a run must have ended


class Forked:
    """A process forked from this one, with the methods of `subprocess.Popen` that are needed."""

    def __init__(self, function: Callable[[], int], folder: Path, output: Path, env: dict[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(function, folder, output, env)

    @staticmethod
    def _run(function: Callable[[], int], folder: Path, output: Path, env: dict[str, str]) -> None:
        code = 1
        try:
            # as multiprocessing does: what the parent is to do at its end, such as to remove its folders, is not ours
            atexit._clear()
            atexit.register(multiprocessing.util._exit_function)
            weakref.finalize._registry.clear()
            weakref.finalize._registered_with_atexit = False
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)  # a job in the background ignores SIGINT
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(env)
            target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(target, 1)
            os.dup2(target, 2)
            sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
            for name in logging.root.manager.loggerDict:
                for handler in logging.getLogger(name).handlers:
                    if isinstance(handler, logging.StreamHandler):
                        handler.setStream(sys.stderr)
            faulthandler.register(signal.SIGUSR2, file=target)
            torch.set_num_threads(1)
            code = function()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it."""
        self.send_signal(signal.SIGKILL)


class Ranks:
    """The ranks of `linvit ARGUMENTS`, and what they print.

    Args:
        arguments: Of the command line.
        folder: Where it runs.
        number: Of ranks.
        launcher: "torchrun" starts all of them with its variables; "lightning" starts the first, which starts others.
        env: More variables.
        before: Is called in each process before the command, with the number of its rank.
        call: Is called in the place of the command.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        folder: Path,
        number: int = 1,
        launcher: str = "torchrun",
        env: dict[str, str] | None = None,
        before: Callable[[int], None] = lambda rank: None,
        call: Callable[[], int] | None = None,
    ) -> None:
        self.output = folder / f"output-{time.monotonic_ns()}"
        command = [str(argument) for argument in arguments]
        base = {**os.environ, **(env or {}), "OMP_NUM_THREADS": "1"}
        self.pids = folder / f"{self.output.name}.pids"  # of the ranks that a rank has started

        def function() -> int:
            with self.pids.open("a", encoding="utf-8") as file:
                print(os.getpid(), file=file)
            before(int(os.environ.get("LOCAL_RANK", 0)))
            with undrawn():
                return main(command) if call is None else call()

        if number > 1:
            command += [f"--trainer.devices={number}", "--trainer.strategy=ddp"]
        if number > 1 and launcher == "torchrun":
            port = str(free_port())
            common = {**base, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(number)}
            common |= {"LOCAL_WORLD_SIZE": str(number), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}
            common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            self.store = torch.distributed.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False)
            self.started = [
                Forked(function, folder, self.output, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(number)
            ]
        else:
            self.started = [Forked(lambda: self._launch(function, folder), folder, self.output, base)]

    def _launch(self, function: Callable[[], int], folder: Path) -> int:
        """The first rank: those that Lightning starts are forked, too."""

        def popen(command: Sequence[str], env: dict[str, str], cwd: str | None) -> Forked:
            return Forked(function, folder, self.output, env)

        from lightning.pytorch.strategies.launchers import subprocess_script

        subprocess_script.subprocess = type("Forks", (), {"Popen": staticmethod(popen)})
        return function()

    def rank(self, rank: int) -> int:
        """The process of a rank."""
        if len(self.started) > 1:
            return self.started[rank].pid
        return self._pids()[rank]

    def send(self, number: int, ranks: Sequence[int]) -> None:
        """Sends a signal to ranks."""
        for rank in ranks:
            os.kill(self.rank(rank), number)

    def wait(self, deadline: float = DEADLINE) -> list[int | None]:
        """Exit codes of the processes that were started here; those that hang are killed and have None."""
        end = time.monotonic() + deadline
        told = False
        while any(process.poll() is None for process in self.started) and time.monotonic() < end:
            if not told and any(process.poll() for process in self.started):  # as torchrun does
                told = True
                for process in self.started:
                    process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
        codes = [process.poll() for process in self.started]
        for pid in [] if None not in codes else filter(_alive, self._pids()):  # where it hangs
            os.kill(pid, signal.SIGUSR2)
            time.sleep(0.5)
        for process in self.started:
            process.kill()
        return codes

    def left(self, deadline: float = DEADLINE) -> list[int]:
        """Ranks that are still there after a deadline; they are killed."""
        pids = self._pids()
        end = time.monotonic() + deadline
        while (alive := [pid for pid in pids if _alive(pid)]) and time.monotonic() < end:
            time.sleep(0.1)
        for pid in alive:
            os.kill(pid, signal.SIGKILL)
        return alive

    def _pids(self) -> list[int]:
        return [int(pid) for pid in self.pids.read_text(encoding="utf-8").split()]

    def text(self) -> str:
        """What was printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and whose parent has not asked is dead, too."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
