"""Reading configurations: exact option names only, and errors one can read."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser

from linvit import callbacks
from linvit.cli.terminal import reflow
from linvit.cli.training.options import options_of, subclasses
from linvit.data.base import ImageData
from linvit.errors import did_you_mean
from linvit.tasks import Task
from linvit.tasks.old_checkpoints import RENAMED_OPTIONS, new_name

# Lines in which jsonargparse explains its types rather than the user's mistake.
NOISE = re.compile(
    r"(Does not validate|Subtypes|Errors|Given value type|Given value: (\[?Namespace|NestedArg|\{)|"
    r"Subclass types expect|a class path \(str\)|a dict with|"
    r"Expected a <class 'NoneType'>|See .*--help)"
)
NONE = re.compile(r"^(--[\w.]+)=None$")
USAGE = "linvit VERB [--option=value ...]"  # a list of all options would be wider than the terminal
SECTIONS = ("config", "base", "model", "data", "trainer", "checkpoint", "non_finite", "seed_everything", "ckpt_path")
UNKNOWN = re.compile(
    r"(?:Option '([\w.]+)' is not accepted|accept option '([\w.]+)'|unrecognized arguments: --([\w.]+))"
)


TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "dict": "a mapping, {name: value, ...}",
    "collections.abc.Mapping": "a mapping, {name: value, ...}",
    **dict.fromkeys(("list", "tuple", "set", "collections.abc.Sequence"), "a list, [...]"),
}
CLASS = re.compile(r"(?:an? )?<class '([\w.]+)'>")
LITERAL = re.compile(r"(?:an? )?typing\.Literal\[([^]]*)\]")


class Parser(LightningArgumentParser):
    """Takes no abbreviations (`--trainer.max_epoch` is a mistake, not `max_epochs`) and raises instead of exiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "exit_on_error": False, "usage": USAGE, **kwargs})

    def format_help(self, *formatter: Any) -> str:
        """The help, no line of it wider than the terminal."""
        return reflow(super().format_help(*formatter)) + "\n"

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Namespace:  # type: ignore[override]
        """Reads `=None` as `=null`: as None jsonargparse hands on the null of `--data.augmentation.crop_scale=null`."""
        if args is not None:
            args = [NONE.sub(r"\1=null", argument) if isinstance(argument, str) else argument for argument in args]
        parsed: Namespace = super().parse_args(args, *others, **options)
        return parsed


def readable(message: str) -> str:
    """What is wrong with a configuration, out of jsonargparse's message, with the nearest option that exists."""
    lines = [re.sub(r"^\s*- ", "  ", line) for line in message.splitlines()]
    kept = [_in_words(line) for line in lines if line.strip() and not NOISE.match(line.strip())]
    unknown = UNKNOWN.search(message)
    if unknown is None:
        return "\n".join(kept)
    first, _, rest = next(group for group in unknown.groups() if group).partition(".")
    if rest and first not in SECTIONS:
        return "\n".join(kept) + "." + did_you_mean(first, SECTIONS)
    name = (rest or first).rpartition(".")[2]
    if name in RENAMED_OPTIONS:
        return "\n".join(kept) + f". {new_name(name)}"
    owners = [Trainer, ModelCheckpoint, *subclasses(Task), *subclasses(ImageData)]
    owners += [getattr(callbacks, name) for name in callbacks.__all__]
    names = {option.rpartition(".")[2] for owner in owners for option in options_of(owner)} | set(SECTIONS)
    return "\n".join(kept) + "." + did_you_mean(name, names)


def _in_words(line: str) -> str:
    """A line with types of Python in words."""
    line = CLASS.sub(lambda match: TYPES.get(match[1], match[1]), line)
    line = LITERAL.sub(lambda match: f"one of {match[1].replace(chr(39), '')}", line)
    line = re.sub(
        r"Expected a path but \S+ either not accessible or invalid", "Expected a file, and there is none", line
    )
    return line.replace("a dot import path string", "the path of a class, package.module.Class")


def integers_first(trainer: type[Trainer]) -> None:
    """Makes `--trainer.limit_val_batches=1` mean one batch.

    The Trainer's arguments of type `int | float` reach the parser as `float | int`, since typing keeps one order for
    both, and 1.0 means all batches. A union written with | keeps its order.
    """
    for function in (trainer.__init__, inspect.unwrap(trainer.__init__)):
        for name, kind in list(function.__annotations__.items()):
            if kind == int | float:
                function.__annotations__[name] = int | float
            elif kind == int | float | None:
                function.__annotations__[name] = int | float | None
