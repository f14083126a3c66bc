"""The processes of a run: each notices when another has ended, and one of them says which and why."""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import subprocess_script
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # documented, and not in its __all__

from linvit.runs.folder import how_to_resume
from linvit.signals import STOP

LAUNCHER = "LINVIT_LAUNCHER"  # variable with the process that has started the others on this machine
GRACE = 10.0  # seconds in which a rank can end by itself after another has ended
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")


class Ranks(Callback):
    """Ends all ranks of a run when one has ended, and finds out which it was.

    torch's own errors name no rank, and every rank prints its own. Here a rank that fails says so in a store that
    all share, and the others answer from a thread, even while they wait. Those
    that do not answer have been killed.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.rank, self.world = trainer.global_rank, trainer.world_size
        self.run: Path | None = None
        self._over = threading.Event()  # from now on none is to be ended by another
        self._listener: threading.Thread | None = None
        self._where_rank_0 = ""
        self._connection: Store | None = None
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]
        if self.world == 1:
            return
        meet_after_a_restart()
        # Lightning's own thread would kill them all, this process included, without a word
        subprocess_script._launch_process_observer = self._watch_children  # type: ignore
        own = str(os.getppid() if torch.distributed.is_torchelastic_launched() else os.getpid())
        launcher = int(os.environ.setdefault(LAUNCHER, own))
        if launcher != os.getpid():
            self._in_thread(self._watch_launcher, launcher)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Says where this rank is, and listens from now on."""
        folder = trainer.log_dir  # which asks rank 0, and that may be gone later
        self.run = Path(folder) if folder is not None and stage == "fit" else None
        self.rank = trainer.global_rank
        if self.world > 1:
            self._connection = store = _connect(trainer)
            store.set(f"where{self.rank}", f"host {socket.gethostname()}, pid {os.getpid()}")
            self._where_rank_0 = store.get("where0").decode()  # the store may end with it
            STOP.tell = lambda code: store.set(f"left{self.rank}", str(code))
            self._listener = self._in_thread(self._answer, store)

    def finish(self) -> None:
        """Is called when all ranks have come to an end in good order.

        A thread that is in the C++ code of the store when the interpreter ends is killed there, which ends the process
        with SIGABRT ("terminate called without an active exception"). So it is waited for.
        """
        self._over.set()
        if self._listener is not None:
            self._listener.join(GRACE)

    def explain(self, error: Exception, own: str) -> None:
        """Says why this rank ends, unless another rank does; `own` is what it has to say of itself."""
        text = f"{self._name(self.rank)}: {own}"
        try:
            if (store := self._connection) is not None:  # else the ranks have not found one another yet
                store.set("failed", "")
                if lost_contact(error) and (missing := self._missing(store)):
                    for rank in missing:
                        if store.check([f"left{rank}"]):  # a signal ended it before it trained, or a second one
                            STOP.exit_now(int(store.get(f"left{rank}")), f"ended by a signal to {self._name(rank)}")
                    text = self._ended(missing)
                if store.add("spoken", 1) > 1:
                    return
        except RuntimeError:  # the store has ended with rank 0
            if self.rank != 1:
                return
            text = self._ended([0])
        self.say(text)

    def say(self, text: str) -> None:
        """Prints why the run has ended, and how to resume it."""
        way = "" if self.run is None else f"{how_to_resume(self.run)}\n"
        os.write(2, f"\nlinvit: error: {text}\n{way}".encode())

    def _missing(self, store: Store) -> list[int]:
        """The ranks that do not answer; none if another rank has said why the run ends."""
        deadline, missing = time.monotonic() + GRACE / 2, set(range(self.world)) - {self.rank}
        while missing and time.monotonic() < deadline:
            if store.add("spoken", 0):
                return []
            time.sleep(0.1)
            missing = {rank for rank in missing if not store.check([f"here{rank}"])}
        return sorted(missing)

    def _answer(self, store: Store) -> None:
        """Answers when a rank has failed, and ends this rank if it does not end by itself."""
        try:
            while not store.check(["failed"]):
                if self._over.wait(1):
                    return
            store.set(f"here{self.rank}", "")
        except RuntimeError:
            pass  # rank 0 has ended
        self._end_soon()

    def _watch_children(self, processes: list[subprocess.Popen[bytes]]) -> None:
        STOP.children = processes
        self._in_thread(self._wait_for_children)

    def _wait_for_children(self) -> None:
        while not (failed := [process for process in STOP.children if process.poll()]):
            time.sleep(0.5)
        code, rank = failed[0].returncode, STOP.children.index(failed[0]) + 1
        if STOP.is_exit_code(code) and not self._over.is_set():
            STOP.exit_now(code, f"ended by a signal to {self._name(rank)}")
        self._end_soon(self._ended([rank]) if code < 0 else "")  # one that was not killed has said why it ended

    def _watch_launcher(self, launcher: int) -> None:
        """Ends this rank when the process that has started it is gone."""
        while os.getppid() == launcher:
            time.sleep(1)
        self._end_soon()

    def _end_soon(self, why: str = "") -> None:
        """Ends this rank if it does not end by itself."""
        if not self._over.wait(GRACE):
            if why:
                self.say(why)
            STOP.exit_now(1)

    def _ended(self, ranks: Sequence[int]) -> str:
        """How other ranks have ended, as far as that is known."""
        return "; ".join(f"{self._name(rank)} was killed{self._by(rank)}" for rank in ranks)

    def _by(self, rank: int) -> str:
        child = STOP.children[rank - 1] if 1 <= rank <= len(STOP.children) else None
        code = None if child is None else child.poll()
        by = f" by {signal.Signals(-code).name}" if code and code < 0 else ""
        return by + (", perhaps out of memory" if by in ("", " by SIGKILL") else "")

    def _name(self, rank: int) -> str:
        where, store, key = self._where_rank_0 if rank == 0 else "", self._connection, f"where{rank}"
        with suppress(RuntimeError):  # the store has ended
            if store is not None and store.check([key]):
                where = store.get(key).decode()
        return f"rank {rank} ({where})" if where else f"rank {rank}"

    @staticmethod
    def _in_thread(function: Callable[..., Any], *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        thread.start()
        return thread


def _connect(trainer: Trainer) -> Store:
    """A store that all ranks share, apart from torch's own, which a thread that waits in it keeps from others."""
    host, own = os.environ["MASTER_ADDR"], None
    if trainer.is_global_zero:
        own = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    port = trainer.strategy.broadcast(0 if own is None else own.port)
    return TCPStore(host, port, is_master=False) if own is None else own


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
