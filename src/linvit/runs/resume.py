"""`--resume=auto`: one command that starts a run, continues it, or says that it is finished."""

from collections.abc import Sequence
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from linvit import yaml_text
from linvit.errors import UserError
from linvit.files import LAST, PREVIOUS
from linvit.runs.checkpoint import Checkpoint
from linvit.runs.folder import CONFIG, RunFolder, run_name, run_of_config, shown, versions
from linvit.signatures import equal_options
from linvit.tasks.base import SET_BY_RUN


def run_to_resume(configs: Sequence[str], root: Path, settings: Namespace) -> Path | None:
    """The run folder that the last configuration lies in, or else the newest run of its name; None if there is none.

    A run of another model or seed than this command's is passed over, and that is said.
    """
    if (own := run_of_config(configs)) is not None:
        return own
    for run in reversed(versions(root / run_name(configs))):
        if not (differences := differs(run, settings)):
            return run
        rank_zero_info(f"--resume=auto passes over {shown(run)}, which has {'; '.join(differences)}")
    return None


def differs(run: Path, settings: Namespace) -> list[str]:
    """In which options of the model, and in which seed, a run differs from a command line; options of both count."""
    try:
        saved = yaml_text.load(yaml_text.read(run / "config.yaml"), "config.yaml")
        model, seed = saved["model"], saved["seed_everything"]
        theirs = {"seed_everything": seed, "model": model["class_path"]} | {
            f"model.{name}": value for name, value in model["init_args"].items()
        }
    except (OSError, UserError, ValueError, KeyError, TypeError, AttributeError):
        return []  # it was killed before it had saved its configuration
    own = {"seed_everything": settings.seed_everything, "model": settings.model.class_path} | {
        f"model.{name}": value for name, value in settings.model.as_dict()["init_args"].items()
    }
    free = {f"model.{name}" for name in SET_BY_RUN}
    if not own.get("model.teacher") or not theirs.get("model.teacher"):
        free.remove("model.teacher")  # a student may lie beside its teacher, and have its name and model
    both = [name for name in own if name in theirs and name not in free and not equal_options(own[name], theirs[name])]
    return [f"{name}={theirs[name]} and not {own[name]}" for name in both]


def newest_checkpoint(run: Path) -> Checkpoint | None:
    """The newest checkpoint of a run that is whole and can be resumed; says which it passes over, and why."""
    folder = run / "checkpoints"
    if (last := _whole(folder / LAST)) is not None:
        return last
    others = sorted(folder.glob("*.ckpt"), key=lambda path: path.name == PREVIOUS)  # of equal steps it is the better
    found = [checkpoint for path in others if path.name != LAST and (checkpoint := _whole(path)) is not None]
    return max(reversed(found), key=lambda checkpoint: checkpoint.step, default=None)


def has_last_evaluation(run: Path, checkpoint: Checkpoint, max_steps: int) -> bool:
    """Whether the evaluation that belongs to a run's last checkpoint is in its metrics.csv, if it writes one."""
    if not (run / CONFIG).exists():
        return True
    found = RunFolder(run)
    logger = found.config["trainer"].get("logger")
    epochs = None if 0 <= max_steps <= checkpoint.step else checkpoint.epochs
    return logger is False or found.evaluated(epochs, checkpoint.step)


def before(run: Path, checkpoint: Checkpoint) -> Checkpoint:
    """The newest checkpoint of a run that is older than a given one."""
    others = map(_whole, sorted((run / "checkpoints").glob("*.ckpt")))
    older = [other for other in others if other is not None and other.step < checkpoint.step]
    if not older:
        raise UserError(
            f"{shown(run)} was trained to its end, but its last evaluation is not in its metrics.csv, and there is no "
            f"earlier checkpoint to continue from. To score it: linvit validate --config {shown(run / 'config.yaml')} "
            f"--ckpt_path {shown(Path(checkpoint.path))}; to train it again, delete its folder"
        )
    return max(older, key=lambda other: (other.step, Path(other.path).name == PREVIOUS))


Found = tuple[Path | None, Checkpoint | None, bool]
"""The run to resume and its checkpoint, either of which may be None, and whether it is finished already."""


def find(configs: Sequence[str], root: Path, settings: Namespace) -> Found:
    """The run that a command line resumes, which is said."""
    run, trainer = run_to_resume(configs, root, settings), settings.trainer
    if run is None:
        rank_zero_info(f"--resume=auto: there is no such run of '{run_name(configs)}' in {shown(root)} yet, one starts")
        return None, None, False
    checkpoint = newest_checkpoint(run)
    if checkpoint is None:
        damaged = any((run / "checkpoints").glob("*.ckpt"))
        way = "none of its checkpoints can be used, so a new run starts" if damaged else "it has no checkpoint yet"
        (rank_zero_warn if damaged else rank_zero_info)(f"--resume=auto: {shown(run)}: {way}")
        return None if damaged else run, None, False
    epochs = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= checkpoint.epochs
    trained = epochs or 0 <= trainer.max_steps <= checkpoint.step or checkpoint.stopped_early
    if trained and has_last_evaluation(run, checkpoint, trainer.max_steps):
        rank_zero_info(
            f"--resume=auto: {shown(run)} is finished already, at step {checkpoint.step}, {checkpoint.epochs} epochs. "
            f"To train it for longer, raise --trainer.max_epochs; to start again, leave --resume out"
        )
        return run, checkpoint, True
    if trained:
        checkpoint = before(run, checkpoint)
        rank_zero_warn(f"--resume=auto: {shown(run)} was trained to its end, but its last evaluation is missing")
    rank_zero_info(f"--resume=auto: {shown(run)} continues from {Path(checkpoint.path).name}, step {checkpoint.step}")
    return run, checkpoint, False


class SameCheckpoint(Callback):
    """Makes sure that all ranks have found what rank 0 has found: file systems of several machines may lag behind."""

    def __init__(self, found: Found) -> None:
        run, checkpoint, _ = found
        self.found = str(run), checkpoint and str(checkpoint.path), checkpoint and checkpoint.step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raises a `UserError` on a rank that differs."""
        first = trainer.strategy.broadcast(self.found)
        if first != self.found:
            raise UserError(
                f"--resume=auto found {self.found} (run, checkpoint, step) on rank {trainer.global_rank}, and {first} "
                f"on rank 0. If their file systems are one, start again: one of them was not up to date"
            )


def _whole(path: Path) -> Checkpoint | None:
    if not path.exists():
        return None
    try:
        return Checkpoint(path, resumed=True)
    except UserError as error:
        reason = str(error.__cause__ or error).partition("\n")[0]  # without advice
        rank_zero_warn(f"--resume=auto passes over {shown(path)}: {reason}")
        return None
