"""How a run ends that a signal or an error ends: its last words and its exit code."""

import errno
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from linvit.callbacks.save_checkpoints import SaveCheckpoints
from linvit.errors import UserError, find_user_error
from linvit.runs.folder import shown
from linvit.runs.ranks import Ranks, lost_contact
from linvit.runs.summary import how_to_go_on
from linvit.signals import STOP, Stopped, name

REFUSALS = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPERM, errno.EACCES)
LOADER = re.compile(r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (is killed by signal: (\w+)|exited unexpectedly)")


@contextmanager
def in_words(trainer: Trainer, ranks: Ranks) -> Iterator[None]:
    """Runs a verb; says in a line, on one rank, what ends it. An error of a single process keeps its traceback."""
    try:
        yield
        ranks.finish()
    except Stopped as stop:
        STOP.ended_by = stop.by
        ranks.finish()
        rank_zero_info(f"{stop}\n{how_to_go_on(ranks.run)}" if ranks.run is not None else str(stop))
        with suppress(RuntimeError):  # another rank is gone
            trainer.strategy.barrier()  # launchers end the others when one has ended, and loggers are to be closed
        raise SystemExit(STOP.exit_code(stop.by)) from None
    except Exception as error:
        loader = LOADER.search(str(error))
        if loader is not None and loader[2] == "Terminated" and STOP.received is not None:
            # the cluster's signal has reached all processes, and these loaders are not linvit's
            STOP.exit_now(STOP.exit_code(STOP.received), f"ended by {name(STOP.received)}")
        mistake = find_user_error(error) or _refused_by_the_disk(error, trainer)
        if trainer.world_size == 1 and loader is None:
            if mistake is not None:
                raise mistake from error
            raise
        own = str(mistake or (loader and f"loader process: {error}") or f"{type(error).__name__}: {error}")
        if mistake is None:
            own += _written(ranks, error)
        if trainer.world_size == 1:
            ranks.say(own)
            raise SystemExit(1) from error
        ranks.explain(error, own)
        STOP.exit_now(1 if mistake is None else 2)


def unsaved(trainer: Trainer) -> str | None:
    """Says which checkpoint could not be saved when that was last tried; None if there is none."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, SaveCheckpoints) and callback.failure is not None:
            return (
                f"the run has ended, but {callback.failure}. What lay there before is as it was. Mend that, then "
                f"{how_to_go_on(Path(str(trainer.log_dir)))}"
            )
    return None


def _refused_by_the_disk(error: Exception, trainer: Trainer) -> UserError | None:
    """What to say if the disk refuses to take a file: the checkpoint that is missing, or else the file."""
    if isinstance(error, OSError) and error.errno in REFUSALS:
        return UserError(unsaved(trainer) or f"a file could not be written: {error}")
    return None


def _written(ranks: Ranks, error: Exception) -> str:
    """Writes the traceback of the current exception to the run's folder and says where it is.

    Without a folder it is printed, unless the cause lies in another rank.
    """
    text, path = traceback.format_exc(), (ranks.run or Path("no folder")) / f"traceback_rank_{ranks.rank}.txt"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError:
        if not lost_contact(error):
            sys.stderr.write(text)
        return ""
    return f"; its traceback is in {shown(path)}"
