"""End of a run: its scores, or the message and the exit code when a signal or an error ends the process.

Most cases are left to launchers: torchrun and `srun --kill-on-bad-exit` end all ranks when one has failed. With
Lightning's own launcher, the first rank watches the ranks that it has started on this machine, and they watch it.
"""

import errno
import os
import re
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, and not in its __all__

from linvit.callbacks.save_checkpoints import SaveCheckpoints
from linvit.errors import UserError, find_user_error
from linvit.io.files import LAST
from linvit.io.plain_text import in_shell, shown
from linvit.io.signals import STOP, Stopped, name
from linvit.runs.folder import how_to_resume, run_config
from linvit.tasks.published import PublishedScores

LAUNCHER = "LINVIT_LAUNCHER"  # variable with the id of the process that started the others on this machine
GRACE = 10.0  # seconds in which a rank can end by itself after another has ended
NO_METRIC = "Early stopping conditioned on metric"  # Lightning's RuntimeError
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")


class Ranks(Callback):
    """Ends all ranks of a run on this machine when one has ended, and reports which one."""

    def __init__(self, trainer: Trainer, command: str | None = None) -> None:
        self.command = command  # command that resumes the run, if it is not linvit fit
        self.rank, self.world = trainer.global_rank, trainer.world_size
        self.run: Path | None = None
        self.over = threading.Event()  # set when all ranks have ended in good order; disables the watching
        trainer.callbacks.insert(0, self)  # type: ignore[attr-defined]
        if self.world == 1:
            return
        meet_after_a_restart()
        # Lightning's own thread would kill all of them, this process included, without a message
        subprocess_script._launch_process_observer = self._watch_children  # type: ignore
        own = str(os.getppid() if torch.distributed.is_torchelastic_launched() else os.getpid())
        self._launcher = int(os.environ.setdefault(LAUNCHER, own))
        if self._launcher != os.getpid():
            threading.Thread(target=self._watch_launcher, daemon=True).start()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stores the rank of this process and the folder of the run."""
        folder = trainer.log_dir  # log_dir asks rank 0, which may be gone later
        self.run = Path(folder) if folder is not None and stage == "fit" else None
        self.rank = trainer.global_rank

    def explain(self, error: Exception, own: str) -> None:
        """Prints why this rank ends, unless its launcher ends it first because another rank has printed the reason."""
        lost = lost_contact(error)
        seconds = GRACE if lost else GRACE / 4 * (self.rank > 0)  # rank 0 reports a mistake of all
        before, deadline = None if lost else STOP.received, time.monotonic() + seconds
        while STOP.received is before and time.monotonic() < deadline:
            time.sleep(0.1)
        if STOP.received is before:
            other = "another rank has ended, was stopped or does not respond: " * lost
            self.say(f"{self._name(self.rank, os.getpid())}: {other}{own}")

    def say(self, text: str) -> None:
        """Prints why the run has ended, and how to resume it."""
        way = "" if self.run is None else f"{how_to_resume(self.run, self.command)}\n"
        os.write(2, f"\nlinvit: error: {text}\n{way}".encode())

    def _watch_children(self, processes: list[subprocess.Popen[bytes]]) -> None:
        STOP.children = processes
        threading.Thread(target=self._wait_for_children, daemon=True).start()

    def _wait_for_children(self) -> None:
        while not (failed := [process for process in STOP.children if process.poll()]):
            time.sleep(0.5)
        code, rank = failed[0].returncode, STOP.children.index(failed[0]) + 1
        name = self._name(rank, failed[0].pid)
        if self.over.is_set():
            return
        if STOP.is_exit_code(code):
            STOP.exit_now(code, f"ended by a signal to {name}")
        if code < 0:  # a rank that was not killed has printed its reason
            memory = ", perhaps out of memory" * (code == -signal.SIGKILL)
            self.say(f"{name} was killed by {signal.Signals(-code).name}{memory}")
        STOP.exit_now(max(code, 1))

    def _watch_launcher(self) -> None:
        """Ends this rank when the process that has started it has ended."""
        while os.getppid() == self._launcher:
            time.sleep(1)
        if not self.over.wait(GRACE / 4):
            if self.rank == 1 and not torch.distributed.is_torchelastic_launched():
                self.say(f"{self._name(0, self._launcher)} was killed, perhaps out of memory")
            STOP.exit_now(1)

    @staticmethod
    def _name(rank: int, process: int) -> str:
        return f"rank {rank} (host {socket.gethostname()}, pid {process})"


def meet_after_a_restart() -> None:
    """Gives ranks that torchrun has restarted a fresh prefix in the store that it keeps over restarts.

    Otherwise the first rank finds the addresses of processes that have ended, and fails with "connection
    refused" (torch 2.15). Ranks on several machines may have been restarted unequally often, so they are not changed.
    """
    env = os.environ
    restarts, kept = env.get("TORCHELASTIC_RESTART_COUNT", "0"), env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts != "0" and kept and env.get("GROUP_WORLD_SIZE") == "1":
        store = PrefixStore(f"restart {restarts}", TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"])))
        torch.distributed.init_process_group(store=store, rank=int(env["RANK"]), world_size=int(env["WORLD_SIZE"]))


def lost_contact(error: Exception) -> bool:
    """True if an error means that another rank is gone."""
    lost = isinstance(error, torch.distributed.DistError) or any(text in str(error) for text in LOST)
    return isinstance(error, RuntimeError) and lost


REFUSALS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPERM, errno.EACCES)
LOADER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (is killed by signal: (\w+)|exited unexpectedly)")


@contextmanager
def report_exit(trainer: Trainer, ranks: Ranks) -> Iterator[None]:
    """Runs a verb; one rank prints an error in one line. An error of a single process keeps its traceback."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
        ranks.over.set()
    except SystemExit as error:
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        signal.signal(signal.SIGINT, before)  # Lightning ignores further ones, and ends a notebook's process
        raise error.__context__ from None
    except Stopped as stop:
        STOP.ended_by = stop.by
        ranks.over.set()
        way = "" if ranks.run is None else f"\n{how_to_resume(ranks.run, ranks.command)}"
        rank_zero_info(f"{stop}{way}")
        with suppress(RuntimeError):  # another rank is gone
            trainer.strategy.barrier()  # launchers end all ranks when one has ended; loggers must be closed first
        raise SystemExit(STOP.exit_code(stop.by)) from None
    except Exception as error:
        loader = LOADER.search(str(error))
        if loader is not None and loader[2] == "Terminated" and STOP.received is not None:
            # the cluster's signal has reached all processes, and these loaders are not linvit's
            STOP.exit_now(STOP.exit_code(STOP.received), f"ended by {name(STOP.received)}")
        mistake = find_user_error(error)
        if isinstance(error, MisconfigurationException) or str(error).startswith(NO_METRIC):
            mistake = mistake or UserError(str(error))
        if isinstance(error, OSError) and error.errno in REFUSALS:  # by the disk
            way = "" if ranks.run is None or trainer.world_size > 1 else f"; {how_to_resume(ranks.run, ranks.command)}"
            mistake = UserError(f"a file could not be written: {error}{way}")
        if isinstance(error, FileNotFoundError) and mistake is None:
            mistake = moved(trainer)
        if trainer.world_size == 1 and loader is None:
            if mistake is not None:
                raise mistake from error
            raise
        own = str(mistake or (loader and f"loader process: {error}") or f"{type(error).__name__}: {error}")
        if mistake is None:
            path = (ranks.run or Path("no folder")) / f"traceback_rank_{ranks.rank}.txt"
            try:
                path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
                own += f"; its traceback is in {shown(path)}"
            except OSError:
                if not lost_contact(error):
                    traceback.print_exception(error)
        if trainer.world_size == 1:
            ranks.say(own)
            raise SystemExit(1) from error
        ranks.explain(error, own)
        STOP.exit_now(1 if mistake is None else 2)


def moved(trainer: Trainer) -> UserError | None:
    """Returns an error if the folder of the run was renamed or deleted; None if not, and None on ranks other than 0."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, SaveCheckpoints) and trainer.is_global_zero and trainer.state.fn == "fit":
            try:
                callback.check_folder()
            except UserError as error:
                return error
    return None


def run_summary(saves: SaveCheckpoints, predict_with: str, run: Path, changes: Sequence[str]) -> str:
    """Returns the best scores, their checkpoints, and the commands to resume and test; "" if nothing was saved."""
    paths: list[Path] = []
    lines: list[str] = []
    folder = Path(str(saves.dirpath))
    for best in (best for best in saves.best if best.value is not None and (folder / best.name).exists()):
        paths.append(folder / best.name)
        lines += [f"best {best.monitor}  {best.value:.4f}", f"checkpoint      {shown(paths[-1]).as_posix()}"]
    if not (folder / LAST).exists():
        return ""
    config = in_shell(run_config(run))
    if paths:
        checkpoint = in_shell(paths[-(predict_with == "ema")])
        lines.append(f"test it         linvit test --config {config} --ckpt_path {checkpoint}")
    more = "".join(f" --trainer.{one}" for one in changes)
    lines.append(f"resume it       linvit fit --config {config} --resume=auto{more}")
    if any(run.glob("events.out.tfevents.*")):
        lines.append(f"look at it      tensorboard --logdir {in_shell(run.parent)}")
    return "\n" + "".join(f"  {line}\n" for line in lines)


def score_table(scores: Mapping[str, float], images: str, known: PublishedScores | None) -> str:
    """Returns the scores of `images`, those of the moving average last, beside the published ones."""
    lines = [images + (f"; published: {known.source}" if known else "")]
    lines.append(f"  {'':<18} {'ours':<12} {'published' if known else ''}".rstrip())
    names = {tag: tag.rpartition("/")[2].removeprefix("ema_") for tag in scores}
    for tag in sorted(scores, key=lambda tag: ("/ema_" in tag, {"score": 0, "loss": 2}.get(names[tag], 1))):
        beside = f"{known.scores[names[tag]]:.4f}" if known and names[tag] in known.scores else ""
        lines.append(f"  {tag:<18} {scores[tag]:<12.7g} {beside}".rstrip())
    return "\n".join(lines)
