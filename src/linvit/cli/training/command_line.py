"""`linvit fit | validate | test | predict`: runs a command line or prints the help."""

import pkgutil
import shlex
from typing import Any

from lightning.pytorch import Trainer

from linvit.cli.options import read_options
from linvit.cli.training.help import HELP, TRAINER, Row, short_help
from linvit.io.machine import keep_memory
from linvit.runs.library_messages import hide_library_messages
from linvit.runs.parser import options_of
from linvit.runs.run import Run
from linvit.tasks.base import SET_BY_DATA

TASK, DATA = "linvit.tasks.ClassificationTask", "linvit.data.ClassificationData"


def train(argv: list[str]) -> None:
    """Runs a command line; with --help prints the options of the classes that it names."""
    keep_memory()
    hide_library_messages()
    verb, *options = ["--help" if argument == "--help=all" else argument for argument in argv if argument not in HELP]
    see = f"\nSee linvit {verb} --help"
    if set(HELP).isdisjoint(argv):
        own = [option for option in options if option != "--untrained" or verb == "fit"]
        run = Run(read_options(verb, own, see=see), verb, untrained=len(own) < len(options))
        run.command = shlex.join(["linvit", *argv])
        getattr(run, verb)()
    elif options:
        config = read_options(verb, options, see=see)
        print(short_help(verb, option_rows(config["model"]["class_path"], config["data"]["class_path"])))
    else:
        print(short_help(verb, option_rows()))


def option_rows(task: str = TASK, data: str = DATA) -> list[Row]:
    """Returns the options of a task, of data and of the trainer that users need, each with a sentence."""
    rows: list[tuple[str, Any, str]] = []
    for key, path, hidden in (("model", task, SET_BY_DATA), ("data", data, ())):
        owner = pkgutil.resolve_name(path)
        hidden = (*hidden, *getattr(owner, "advanced_options", ()))
        own = [(name, one) for name, one in options_of(owner).items() if name.rpartition(".")[2] not in hidden]
        own.sort(key=lambda option: "." in option[0])  # nested options last
        rows += [(f"--{key}.{name}", one.default, one.help) for name, one in own]
    defaults = options_of(Trainer)
    rows += [(f"--trainer.{name}", defaults[name].default, text) for name, text in TRAINER.items()]
    return [
        (f"{option}={'null' if default is None else default}", " ".join(text.split()).partition(". ")[0])
        for option, default, text in rows
    ]
