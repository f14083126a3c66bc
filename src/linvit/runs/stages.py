"""Stages of a configuration with a teacher: runs that each start from the last weights of the previous one."""

import gc
from pathlib import Path
from typing import Any

from linvit.errors import UserError
from linvit.io.files import LAST
from linvit.runs.options import replace_options, stage_config
from linvit.runs.parser import Config
from linvit.runs.run import Run
from linvit.runs.train_teacher import train_teacher
from linvit.tasks.teacher import Teacher


def stages_of(config: Config) -> list[Config]:
    """Returns the configurations of the stages, all but the last in folders stage_1, ...; of one run without stages."""
    stages = config["stages"] or [{}]
    root = Path(config["trainer"]["default_root_dir"] or "checkpoints")
    places = [*(root / f"stage_{number}" for number in range(1, len(stages))), root]
    return [
        replace_options(stage_config(config, stage), {"trainer.default_root_dir": str(place)})
        for stage, place in zip(stages, places, strict=True)
    ]


def check_stages(config: Config) -> Run:
    """Rejects wrong options of all stages, then trains teachers that have no weights yet; returns the last run.

    Raises:
        UserError: If a stage has no teacher, or one that does not fit its student, or `ckpt_path` is set for stages.
    """
    if config["ckpt_path"] and config["stages"]:
        raise UserError("--ckpt_path is for one run, but stages are several runs: resume them by --resume=auto")
    teachers: list[Teacher] = []
    for stage in stages_of(config):
        run = Run.from_config(stage)
        if run.task.teacher is None:
            raise UserError("give the trained network to linearize: --teacher RUN, or model.teacher.source")
        teachers.append(run.task.teacher)
    trained = [train_teacher(teacher) for teacher in teachers]
    for stage in stages_of(config) if config["stages"] or any(trained) else []:
        run = Run.from_config(stage)
        run.task.distillation.load(run.task)  # rejects a teacher that does not fit a later stage
        run.task.distillation.teardown()
    return run


def fit_stages(config: Config, resume: str | None, command: str, resume_with: str) -> tuple[Run, list[Path]]:
    """Trains stage after stage; returns the last run, and the folders of all.

    Args:
        config: The configuration.
        resume: "auto" resumes the stage that was interrupted; later stages are new runs.
        command: What the user typed, for the records.
        resume_with: What resumes the training.
    """
    run: Run | None = None
    folders = list[Path]()
    for stage in stages_of(config):
        here: dict[str, Any] = {"resume": resume}
        if run is not None and not run.trainer.fast_dev_run:  # type: ignore[attr-defined]
            averaged = run.task.hparams["predict_with"] == "ema"
            before = {"source": f"{folders[-1]}/checkpoints/{LAST}", "ema": averaged}
            here |= {"model.pretrained": before, "model.teacher.copied": "nothing"}
        run = Run.from_config(replace_options(stage, here))
        run.command, run.resume_with = command, resume_with
        gc.collect()  # trainer and network of the previous stage refer to one another
        run.fit()
        folders.append(Path(str(run.trainer.log_dir)))  # all ranks take part in log_dir
        if not run.finished:
            resume = None
    assert run is not None
    return run, folders
