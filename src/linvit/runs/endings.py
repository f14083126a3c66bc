"""How a run ends: its scores, or the last words of one that a signal or an error ends, and its exit code."""

import errno
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

from linvit.callbacks.save_checkpoints import SaveCheckpoints
from linvit.errors import UserError, find_user_error
from linvit.runs.folder import how_to_resume, run_config, shown
from linvit.runs.ranks import Ranks, lost_contact
from linvit.signals import STOP, Stopped, name
from linvit.tasks.published import PublishedScores

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
        rank_zero_info(f"{stop}\n{how_to_resume(ranks.run)}" if ranks.run is not None else str(stop))
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
                f"the run has ended, but {callback.failure}. What lay there before is as it was. Correct that, then "
                f"{how_to_resume(Path(str(trainer.log_dir)))}"
            )
    return None


def _refused_by_the_disk(error: Exception, trainer: Trainer) -> UserError | None:
    """What to say if the disk refuses to take a file: the checkpoint that is missing, or else the file."""
    if isinstance(error, OSError) and error.errno in REFUSALS:
        return UserError(unsaved(trainer) or f"a file could not be written: {error}")
    return None


def _written(ranks: Ranks, error: Exception) -> str:
    """Writes the traceback of the current exception to the run's folder and says where it is."""
    text, path = traceback.format_exc(), (ranks.run or Path("no folder")) / f"traceback_rank_{ranks.rank}.txt"
    try:
        path.write_text(text, encoding="utf-8")
    except OSError:
        if not lost_contact(error):
            sys.stderr.write(text)
        return ""
    return f"; its traceback is in {shown(path)}"


def run_summary(saves: SaveCheckpoints, predict_with: str, run: Path, length: str) -> str:
    """Best scores, their checkpoints, and the commands to continue with; "" if none is kept."""
    found = [best for best in saves.best if best.value is not None]
    if not found:
        return ""
    paths = [str(shown(Path(str(saves.dirpath), best.name))) for best in found]
    config = quote(str(shown(run_config(run))))
    lines = []
    for best, path in zip(found, paths, strict=True):
        lines += [f"best {best.monitor}  {best.value:.4f}", f"checkpoint      {path}"]
    lines += [
        f"test it         linvit test --config {config} --ckpt_path {quote(paths[-(predict_with == 'ema')])}",
        f"continue it     linvit fit --config {config} --resume=auto --trainer.{length}=MORE",
        f"look at it      tensorboard --logdir {quote(str(shown(run.parent)))}",
    ]
    return "\n" + "".join(f"  {line}\n" for line in lines)


def score_table(scores: Mapping[str, float], images: str, known: PublishedScores | None) -> str:
    """The scores, those of the moving average after those of the weights, and the published ones beside ours.

    `images` says how many they are, in words.
    """
    lines = [images + (f"; published: {known.source}" if known else "")]
    lines.append(f"  {'':<18} {'ours':<12} {'published' if known else ''}".rstrip())
    for tag in sorted(scores, key=_place):
        score = known.scores.get(_name(tag)) if known else None
        beside = "" if score is None else f"{score:.4f}"
        lines.append(f"  {tag:<18} {scores[tag]:<12.7g} {beside}".rstrip())
    return "\n".join(lines)


def _name(tag: str) -> str:
    """The name of the metric."""
    return tag.rpartition("/")[2].removeprefix("ema_")


def _place(tag: str) -> tuple[bool, int]:
    """The weights before their average; of each, the score first and the loss last."""
    return "/ema_" in tag, {"score": 0, "loss": 2}.get(_name(tag), 1)
