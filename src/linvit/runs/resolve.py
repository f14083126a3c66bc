"""Finds the teacher, pretrained weights, the run to resume and the checkpoint of a configuration.

Each function takes a complete configuration and returns a new one.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from linvit.errors import UserError
from linvit.io.files import CHECKPOINTS, LAST
from linvit.runs.checkpoint import Checkpoint, Found, checkpoint_in, find
from linvit.runs.folder import RunFolder, best_checkpoints, newest
from linvit.runs.parser import Config
from linvit.tasks.teacher import Teacher, fill_from_teacher


def root_of(config: Config) -> Path:
    """Returns the folder for the runs of a configuration."""
    return Path(config["trainer"]["default_root_dir"] or "checkpoints").absolute()


def find_teacher(config: Config) -> Config:
    """Sets the teacher to the best checkpoint of a run, or of the newest run in a folder; null is its attention."""
    options = config["model"]["init_args"]
    if options.get("teacher") is None:
        return config
    teacher = Teacher.of(options["teacher"])
    if teacher.source is not None and Path(teacher.source).is_dir():
        folder = Path(teacher.source)
        run = newest(folder, students=False) or RunFolder(folder)  # students are in the same folder
        if teacher.untrained and not run.complete:
            return config  # linvit linearize handles the rest
        teacher = replace(teacher, source=str(checkpoint_in(run.folder, run.best, "--model.teacher.source")))
        given = options["teacher"]
        own = {**given, "source": teacher.source} if isinstance(given, dict) else teacher.source
        config = _with_model(config, teacher=own)
    return _with_model(config, attention=fill_from_teacher(options["attention"], teacher))


def find_pretrained(config: Config) -> Config:
    """Replaces a run's folder by its best checkpoint, with the weights that predict."""
    given: Any = config["model"]["init_args"].get("pretrained") or {}
    options = {"source": given} if isinstance(given, str) else dict(given)
    if not isinstance(folder := options.get("source"), str) or not (Path(folder) / CHECKPOINTS).is_dir():
        return config
    averaged = options.get("ema", RunFolder(Path(folder)).model.get("predict_with") == "ema")
    path = checkpoint_in(folder, best_checkpoints("ema" if averaged else "raw"), "--model.pretrained")
    return _with_model(config, pretrained={**options, "source": str(path), "ema": averaged})


def find_run(config: Config) -> tuple[Config, Found]:
    """Sets the checkpoint of the run that `resume: auto` resumes; a given `ckpt_path` is used for a new run.

    In the returned configuration `resume` is None, since it names a run, not an action.
    """
    found = find(config, root_of(config))
    checkpoint = found[1]
    path = config["ckpt_path"] if checkpoint is None else str(checkpoint.path)
    return {**config, "resume": None, "ckpt_path": path}, found


def find_checkpoint(config: Config, fits: bool) -> tuple[Config, Checkpoint | None]:
    """Replaces a run's folder by its last checkpoint if fit resumes it, else by its best one, and reads it."""
    if not config["ckpt_path"]:
        return config, None
    best = best_checkpoints(config["model"]["init_args"].get("predict_with", "raw"))
    path = str(checkpoint_in(config["ckpt_path"], [LAST] if fits else best))
    return {**config, "ckpt_path": path}, Checkpoint(path, resumed=fits)


def check_epochs(config: Config, checkpoint: Checkpoint) -> None:
    """Raises a `UserError` if the checkpoint to resume has more epochs than the configuration asks for."""
    most = config["trainer"]["max_epochs"]
    if most is not None and 0 <= most < checkpoint.epochs:
        raise UserError(f"checkpoint '{checkpoint.path}' has done {checkpoint.epochs} epochs, more than {most}")


def _with_model(config: Config, **options: Any) -> Config:
    model = config["model"]
    return {**config, "model": {**model, "init_args": {**model["init_args"], **options}}}
