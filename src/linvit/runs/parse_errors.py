"""What is wrong with a configuration, out of jsonargparse's messages."""

import argparse
import difflib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, DefaultHelpFormatter
from lightning.pytorch import Trainer

from linvit.callbacks.non_finite import NonFiniteGuard
from linvit.callbacks.save_checkpoints import SaveCheckpoints
from linvit.data.base import ImageData
from linvit.errors import did_you_mean
from linvit.tasks import Task
from linvit.tasks.base import SET_BY_DATA

# Lines in which jsonargparse explains its types rather than the user's mistake.
NOISE = re.compile(
    r"(Does not validate|Subtypes|Errors|Given value type|Given value: (\[?Namespace|NestedArg|\{)|"
    r"Subclass types expect|a class path \(str\)|a dict with|"
    r"Expected a <class 'NoneType'>|See .*--help)"
)
TOP = ("config", "base", "resume", "seed_everything", "ckpt_path", "requeue_exit_code", "print_config", "model", "data")
CLOSE = 0.7  # of two names, as difflib counts
OTHER_NAMES = {  # what other programs call our options
    "seed": "seed_everything",
    "epochs": "trainer.max_epochs",
    "workers": "data.num_workers",
    "output": "trainer.default_root_dir",
    "gpus": "trainer.devices",
    "amp": "trainer.precision",
}
UNKNOWN = re.compile(
    r"(?:Option '([\w.-]+)' is not accepted|accept option '([\w.-]+)'|unrecognized arguments: --([\w.-]+))"
)
TYPE = re.compile(r"<class '([\w.]+)'>|typing\.Literal(\[[^]]*\])")
CLASS_PATH = re.compile(r"Problem with given class_path '([\w.]+)'")


def readable(message: str) -> str:
    """What is wrong with a configuration, out of jsonargparse's message, with the nearest option that exists."""
    lines = [re.sub(r"^\s*- ", "  ", line) for line in message.splitlines()]
    text = "\n".join(TYPE.sub(r"\1\2", line) for line in lines if line.strip() and not NOISE.match(line.strip()))
    unknown = UNKNOWN.search(message)
    if unknown is None:
        return text
    given = next(group for group in unknown.groups() if group).replace("-", "_").replace("init_args.", "")
    given = given.removesuffix(".class_path")
    owner = pkgutil.resolve_name(owners[-1]) if (owners := CLASS_PATH.findall(message)) else None
    return f"{text}.{_suggestion(given, owner if isinstance(owner, type) else None)}"


def _suggestion(given: str, owner: type | None) -> str:
    """The option to type in place of one that does not exist, as a sentence; empty if none is near."""
    tasks, data = subclasses(Task), subclasses(ImageData)
    if owner is not None and issubclass(owner, Task):
        given, tasks = f"model.{given}", iter([owner])
    elif owner is not None and issubclass(owner, ImageData):
        given, data = f"data.{given}", iter([owner])
    elif owner is not None:  # a callback in a list, whose options no flag sets
        return did_you_mean(given, options_of(owner))
    parts = {"model": tasks, "data": data, "trainer": [Trainer], "checkpoint": [SaveCheckpoints]}
    known = {name: name for name in TOP} | {
        f"{part}.{option}": option.rpartition(".")[2]
        for part, owners in {**parts, "non_finite": [NonFiniteGuard]}.items()
        for owner in owners
        for option in options_of(owner)
        if part != "model" or option not in SET_BY_DATA
    }
    leaf = given.rpartition(".")[2]
    other = OTHER_NAMES.get(leaf)
    like = {option: _likeness(name, leaf) for option, name in known.items()}
    nearest = other or max(known, key=lambda option: like[option] + _likeness(option, given))
    return f" Did you mean --{nearest}?" if other or like[nearest] >= CLOSE else ""


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


class Option(NamedTuple):
    """An option."""

    default: Any
    help: str


def options_of(owner: type) -> dict[str, Option]:
    """Options by name; those of a nested dataclass as `augmentation.hflip`."""
    found = {}

    class Listed(DefaultHelpFormatter):
        """The help is the one place where a parser hands on its options."""

        def add_argument(self, action: argparse.Action) -> None:
            if action.default != argparse.SUPPRESS:  # of --help, and of a nested dataclass as a whole
                found[action.dest] = Option(action.default, action.help or "")

    parser = ArgumentParser(formatter_class=Listed)
    parser.add_class_arguments(owner, fail_untyped=False)
    parser.format_help()
    return found


def subclasses(base: type) -> Iterator[type]:
    """A class and all imported classes below it."""
    yield base
    children: list[type] = base.__subclasses__()
    for child in children:
        yield from subclasses(child)
