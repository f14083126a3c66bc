"""The model of a checkpoint and the data of its configuration, for verbs that train nothing."""

from argparse import ArgumentError
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from linvit.data.base import ImageData
from linvit.errors import UserError
from linvit.runs.bases import with_bases
from linvit.runs.checkpoint import Checkpoint, read_checkpoint
from linvit.runs.parser import Parser, build_task, readable
from linvit.tasks import Task
from linvit.tasks.base import SET_BY_DATA

OTHERS = (
    "trainer",
    "checkpoint",
    "non_finite",
    "seed_everything",
    "ckpt_path",
    "resume",
    "requeue_exit_code",
    "weights_only",
)
"""Options of `linvit fit` that a configuration may have besides the data and the model."""


def read_settings(program: str, options: Sequence[str]) -> Namespace:
    """A configuration's data and model, as `linvit fit` reads them.

    Args:
        program: The command, for messages.
        options: `--config NAME`, and `--data.*` and `--model.*` that win over it.

    Raises:
        UserError: If they cannot be read.
    """
    parser = Parser(program)
    parser.add_argument("--config", action="config")
    parser.add_argument("--base", type=str | list[str] | None)
    for section in OTHERS:
        parser.add_argument(f"--{section}", type=Any)
    parser.add_subclass_arguments(ImageData, "data", required=True)
    parser.add_subclass_arguments(Task, "model", required=True)
    try:
        settings: Namespace = parser.parse_args(with_bases(options))
    except ArgumentError as error:
        raise UserError(f"{readable(error.message)}\nSee {program} --help") from error
    return settings


def data_of(settings: Namespace) -> ImageData:
    """The data module of a configuration."""
    parser = Parser()
    parser.add_subclass_arguments(ImageData, "data")
    data: ImageData = parser.instantiate(Namespace(data=settings.data)).data  # type: ignore[no-untyped-call]
    return data


def trained(path: str | Path, settings: Namespace, num_classes: int | None) -> Task:
    """The task of a checkpoint, which decides the model, with its weights, in evaluation mode.

    Args:
        path: The checkpoint.
        settings: Of a configuration: the class of the task, and what a checkpoint does not decide.
        num_classes: Of the data, if they must agree.

    Raises:
        UserError: If it cannot be read, or belongs to another task or model.
    """
    if Path(path).is_dir():
        raise UserError(f"'{path}' is a sharded checkpoint, which only its strategy can read; save whole weights")
    checkpoint, content = Checkpoint(path), read_checkpoint(path)
    model = deepcopy(settings.model)
    named = model.as_dict()
    checkpoint.decide(model, told=False)
    facts = {fact: checkpoint.from_data(fact, num_classes) for fact in SET_BY_DATA}
    with checkpoint.building(named):
        task = build_task(model, **facts, compile=False)
    checkpoint.check_weights(task)
    task.on_load_checkpoint(content)
    task.load_state_dict(content["state_dict"])
    return task.eval()
