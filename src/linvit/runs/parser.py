"""Reading configurations: exact option names only, and errors one can read."""

import difflib
import inspect
import pkgutil
import re
from collections.abc import Sequence
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from linvit.callbacks import NonFiniteGuard, SaveCheckpoints
from linvit.data.base import ImageData
from linvit.errors import UserError, did_you_mean
from linvit.runs.options import options_of, subclasses
from linvit.tasks import Task
from linvit.tasks.base import SET_BY_DATA
from linvit.tasks.safe_loading import not_plain
from linvit.terminal import reflow

# Lines in which jsonargparse explains its types rather than the user's mistake.
NOISE = re.compile(
    r"(Does not validate|Subtypes|Errors|Given value type|Given value: (\[?Namespace|NestedArg|\{)|"
    r"Subclass types expect|a class path \(str\)|a dict with|"
    r"Expected a <class 'NoneType'>|See .*--help)"
)
NONE = re.compile(r"^(--[\w.]+)=None$")
USAGE = "linvit VERB [--option=value ...]"  # a list of all options would be wider than the terminal
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
CLASS_PATH = re.compile(r"Problem with given class_path '([\w.]+)'")


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


def build_task(model: Namespace, **facts: Any) -> Task:
    """The task that the `model` section of a configuration describes.

    Its options are data, and a checkpoint may have supplied them: they reach the task as they are. The parser would
    call any function that a mapping with a `class_path` names, at any depth.

    Args:
        model: The class and its options.
        facts: Arguments that win over the options, such as `num_classes`.

    Raises:
        UserError: If an option is no plain value, such as a mapping with a `class_path`.
    """
    task: type[Task] = pkgutil.resolve_name(model.class_path)
    given = model.clone().as_dict()
    options = {**given.get("init_args", {}), **given.get("dict_kwargs", {}), **facts}
    for name, value in options.items():
        if reason := not_plain(value):
            raise UserError(f"--model.{name} holds {reason}. It takes text, numbers, lists and mappings of them")
    return task(**options)


def readable(message: str) -> str:
    """What is wrong with a configuration, out of jsonargparse's message, with the nearest option that exists."""
    lines = [re.sub(r"^\s*- ", "  ", line) for line in message.splitlines()]
    text = "\n".join(_in_words(line) for line in lines if line.strip() and not NOISE.match(line.strip()))
    unknown = UNKNOWN.search(message)
    if unknown is None:
        return text
    given = next(group for group in unknown.groups() if group).replace("-", "_").replace("init_args.", "")
    given = given.removesuffix(".class_path")
    owner = pkgutil.resolve_name(owners[-1]) if (owners := CLASS_PATH.findall(message)) else None
    return f"{text}.{_suggestion(given, owner if isinstance(owner, type) else None)}"


def _suggestion(given: str, owner: type | None) -> str:
    """The option to type in place of one that does not exist, as a sentence; empty if none is near.

    Args:
        given: Without dashes. Its section is missing where a class has refused it.
        owner: The class that has refused it, if one has.
    """
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
    section, leaf = given.partition(".")[0] if "." in given else "", given.rpartition(".")[2]
    near = difflib.get_close_matches(section, [*parts, "non_finite"], 1)
    own = [name for option, name in known.items() if near and option.startswith(f"{near[0]}.")]
    hits = difflib.get_close_matches(leaf, own, 1, CLOSE) or difflib.get_close_matches(leaf, known.values(), 1, CLOSE)
    name = OTHER_NAMES.get(leaf) or (leaf if leaf in known.values() else "".join(hits))
    options = [option for option in known if name in (option, known[option])]
    nearest = max(options, key=lambda option: difflib.SequenceMatcher(None, option, given).ratio(), default=None)
    return f" Did you mean --{nearest}?" if nearest else ""


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
