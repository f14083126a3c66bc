"""The processes of a run: all end when one has ended, and it, or the process that has started it, says why.

Launchers do most of it: torchrun and `srun --kill-on-bad-exit` end all ranks when one has failed. Lightning's own is
the first rank, which watches those that it has started here, and they watch it.
"""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import subprocess_script
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, and not in its __all__

from linvit.runs.folder import how_to_resume
from linvit.signals import STOP

LAUNCHER = "LINVIT_LAUNCHER"  # variable with the process that has started the others on this machine
GRACE = 10.0  # seconds in which a rank can end by itself after another has ended
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")


class Ranks(Callback):
    """Ends all ranks of a run on this machine when one has ended, and says which it was."""

    def __init__(self, trainer: Trainer) -> None:
        self.rank, self.world = trainer.global_rank, trainer.world_size
        self.run: Path | None = None
        self._over = threading.Event()  # from now on none is to be ended by another
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]
        if self.world == 1:
            return
        meet_after_a_restart()
        # Lightning's own thread would kill them all, this process included, without a word
        subprocess_script._launch_process_observer = self._watch_children  # type: ignore
        own = str(os.getppid() if torch.distributed.is_torchelastic_launched() else os.getpid())
        self._launcher = int(os.environ.setdefault(LAUNCHER, own))
        if self._launcher != os.getpid():
            _in_thread(self._watch_launcher)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Notes which rank this is, and its folder."""
        folder = trainer.log_dir  # which asks rank 0, and that may be gone later
        self.run = Path(folder) if folder is not None and stage == "fit" else None
        self.rank = trainer.global_rank

    def finish(self) -> None:
        """Is called when all ranks have come to an end in good order."""
        self._over.set()

    def explain(self, error: Exception, own: str) -> None:
        """Says why this rank ends, unless its launcher ends it first, since another has said so."""
        lost = lost_contact(error)
        seconds = GRACE if lost else GRACE / 4 * (self.rank > 0)  # of a mistake that all have met rank 0 speaks
        before, deadline = None if lost else STOP.received, time.monotonic() + seconds
        while STOP.received is before and time.monotonic() < deadline:
            time.sleep(0.1)
        if STOP.received is before:
            self.say(f"{self._name(self.rank, os.getpid())}: {own}")

    def say(self, text: str) -> None:
        """Prints why the run has ended, and how to resume it."""
        way = "" if self.run is None else f"{how_to_resume(self.run)}\n"
        os.write(2, f"\nlinvit: error: {text}\n{way}".encode())

    def _watch_children(self, processes: list[subprocess.Popen[bytes]]) -> None:
        STOP.children = processes
        _in_thread(self._wait_for_children)

    def _wait_for_children(self) -> None:
        while not (failed := [process for process in STOP.children if process.poll()]):
            time.sleep(0.5)
        code, rank = failed[0].returncode, STOP.children.index(failed[0]) + 1
        name = self._name(rank, failed[0].pid)
        if self._over.is_set():
            return
        if STOP.is_exit_code(code):
            STOP.exit_now(code, f"ended by a signal to {name}")
        if code < 0:  # one that was not killed has said why it ended
            memory = ", perhaps out of memory" * (code == -signal.SIGKILL)
            self.say(f"{name} was killed by {signal.Signals(-code).name}{memory}")
        STOP.exit_now(max(code, 1))

    def _watch_launcher(self) -> None:
        """Ends this rank when the process that has started it is gone."""
        while os.getppid() == self._launcher:
            time.sleep(1)
        if not self._over.wait(GRACE / 4):
            if self.rank == 1 and not torch.distributed.is_torchelastic_launched():
                self.say(f"{self._name(0, self._launcher)} was killed, perhaps out of memory")
            STOP.exit_now(1)

    @staticmethod
    def _name(rank: int, process: int) -> str:
        return f"rank {rank} (host {socket.gethostname()}, pid {process})"


def _in_thread(function: Callable[..., Any]) -> None:
    threading.Thread(target=function, daemon=True).start()


def meet_after_a_restart() -> None:
    """Connects ranks that torchrun has restarted by a part of their own of the store that it keeps over restarts.

    Otherwise the rank that comes first finds the addresses of processes that were ended, and fails by "connection
    refused" (torch 2.15). Ranks of several machines may have been restarted unequally often, so they are left alone.
    """
    env = os.environ
    restarts, kept = env.get("TORCHELASTIC_RESTART_COUNT", "0"), env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts != "0" and kept and env.get("GROUP_WORLD_SIZE") == "1":
        store = PrefixStore(f"restart {restarts}", TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"])))
        torch.distributed.init_process_group(store=store, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]))


def lost_contact(error: Exception) -> bool:
    """Whether an error says that another rank is gone."""
    lost = isinstance(error, torch.distributed.DistError) or any(text in str(error) for text in LOST)
    return isinstance(error, RuntimeError) and lost
