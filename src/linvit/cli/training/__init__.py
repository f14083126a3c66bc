"""`linvit fit | validate | test | predict`: verbs of runs; this module avoids their slow imports."""

import os
import re

from linvit.cli.training.help import HELP, default_rows, short_help
from linvit.io.signals import STOP
from linvit.registry.source import import_module

VERBS = ("fit", "validate", "test", "predict")
TASK = re.compile(r"(\w+\.)*[A-Z]\w*[a-z]\w*")  # class of a task, as a value of --model


def fit(argv: list[str]) -> None:
    """Trains a model."""
    _start("fit", argv)


def validate(argv: list[str]) -> None:
    """Scores a checkpoint on the validation split."""
    _start("validate", argv)


def test(argv: list[str]) -> None:
    """Scores a checkpoint on the test split."""
    _start("test", argv)


def predict(argv: list[str]) -> None:
    """Predicts files with the network of --model, or else the data source of a configuration."""
    if names_a_network(argv):
        import_module("linvit.cli.training.predict_files").main(argv)
    else:
        _start("predict", argv)


def _start(verb: str, argv: list[str]) -> None:
    if argv and {*argv} <= {*HELP}:
        print(short_help(verb, default_rows()))
        return
    with STOP.caught():  # also while torch is imported
        import_module("linvit.cli.training.command_line").train([verb, *argv])


def names_a_network(argv: list[str]) -> bool:
    """Returns True if --model names a trained network: not a task class, and without a configuration."""
    given = dict(zip(argv, [*argv[1:], ""], strict=True))
    given |= dict(option.split("=", 1) for option in argv if option.startswith(("--model=", "--config=")))
    model = given.get("--model")
    return model is not None and "--config" not in given and (os.path.exists(model) or not TASK.fullmatch(model))
