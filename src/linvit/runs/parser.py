"""Reads and checks configurations with the parser of LightningCLI; rewords messages of jsonargparse."""

import argparse
import copy
import difflib
import inspect
import pkgutil
import re
import warnings
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from linvit.callbacks.non_finite import NonFiniteGuard
from linvit.callbacks.save_checkpoints import SaveCheckpoints
from linvit.data.base import ImageData
from linvit.errors import UserError, check_number, did_you_mean
from linvit.io.signals import STOP
from linvit.io.terminal import reflow
from linvit.registry.entries import subclasses
from linvit.registry.removed import answer
from linvit.runs import yaml_text
from linvit.tasks import Task
from linvit.tasks.base import SET_BY_DATA
from linvit.tasks.safe_loading import not_plain

NONE = re.compile(r"^(--[\w.]+)=None$")
USAGE = "linvit VERB [--option=value ...]"  # a list of all options would be wider than the terminal
SETTINGS = {"allow_abbrev": False, "exit_on_error": False, "parser_mode": "yaml", "usage": USAGE}
NO_CONFIG = (
    "linvit {0} needs a configuration, which names the model and the data: linvit {0} --config {1}. "
    "linvit list configs lists those that come with linvit"
)
Config = dict[str, Any]
"""A configuration: plain nested values, as `--print_config` prints them. `config` names its files."""


class Parser(LightningArgumentParser):
    """Takes no abbreviations (`--trainer.max_epoch` is a mistake, not `max_epochs`) and raises instead of exiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**SETTINGS, **kwargs})

    def format_help(self, *formatter: Any) -> str:
        """Returns the help text, wrapped to the width of the terminal."""
        return reflow(super().format_help(*formatter)) + "\n"

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **options: Any) -> Namespace:  # type: ignore[override]
        """Reads `=None` as `=null`: jsonargparse turns the null of `--data.augmentation.crop_scale=null` into None."""
        if args is not None:
            args = [NONE.sub(r"\1=null", argument) if isinstance(argument, str) else argument for argument in args]
        parsed: Namespace = super().parse_args(args, *others, **options)
        return parsed


class TrainerOptions(Trainer):
    """Lightning's Trainer with option types in the order that the parser needs.

    Lightning's `int | float` reaches the parser as `float | int`, because typing keeps one order for both, and
    `limit_val_batches=1` would mean all batches.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)


_ORDERED = {int | float: int | float, int | float | None: int | float | None}  # the keys equal both orders
_signature = inspect.signature(Trainer.__init__)
_own = _signature.parameters
TrainerOptions.__init__.__doc__ = Trainer.__init__.__doc__
TrainerOptions.__init__.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[each.replace(annotation=_ORDERED.get(each.annotation, each.annotation)) for each in _own.values()]
)


class _Builder(LightningCLI):
    """Builds the parser of `linvit fit`, `validate`, `test` or `predict`; reads, seeds and instantiates nothing."""

    def __init__(self, verb: str) -> None:
        self.verb = verb
        super().__init__(
            Task,
            ImageData,
            save_config_callback=None,
            trainer_class=TrainerOptions,
            seed_everything_default=0,
            parser_kwargs={"prog": "linvit"},
            parser_class=Parser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            run=False,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds linvit's options and those of the verb, and links the facts of the data to the model."""
        parser.add_argument(
            "--base",
            type=str | list[str] | None,
            help="In a configuration: files or names that it starts from.",
        )
        parser.add_argument(
            "--resume",
            type=Literal["auto"] | None,
            help="For fit: auto resumes the newest run of this configuration, or starts one.",
        )
        parser.add_argument(
            "--stages",
            type=list[dict[str, Any]] | None,
            help="For linearize: options of each of several runs; each starts from the weights of the previous one.",
        )
        parser.add_argument(
            "--requeue_exit_code",
            type=int,
            default=STOP.requeue_exit_code,
            help="Exit code of a run under SLURM that was ended by a signal other than Ctrl-C, so that it is requeued.",
        )
        parser.add_argument(
            "--attention_rank",
            type=bool,
            default=True,
            help="For fit: log the rank of each attention layer, in about 1 %% of the time at most.",
        )
        parser.add_lightning_class_args(SaveCheckpoints, "checkpoint")
        parser.add_lightning_class_args(NonFiniteGuard, "non_finite")
        for name in SET_BY_DATA:  # no options of the model: see `Run.task`
            parser.link_arguments("data", f"model.init_args.{name}", _fact(name), apply_on="instantiate")
        parser.add_method_arguments(Trainer, self.verb, skip=set(self.subcommands()[self.verb]))

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Reads nothing."""
        self.config = Namespace(seed_everything=False)  # type: ignore[no-untyped-call]

    def instantiate_classes(self) -> None:
        """Builds nothing."""


@cache
def parser_of(verb: str) -> LightningArgumentParser:
    """Returns the parser of `linvit fit`, `validate`, `test` or `predict`."""
    return _Builder(verb).parser


def parse(
    verb: str,
    given: Mapping[str, Any] | Sequence[str],
    base: Mapping[str, Any] | None = None,
    names: Sequence[str] = (),
    see: str = "",
) -> Config:
    """Reads and checks the options of a verb.

    Args:
        verb: fit, validate, test or predict.
        given: A configuration, in which options with defaults may be missing; or command-line arguments, in which
            `--config` is followed by files only, without bases.
        base: A configuration that the arguments modify.
        names: The configurations that the arguments come from.
        see: Sentence that is added to errors, such as the command of the help.

    Returns:
        The complete configuration, in plain values. Its entry `config` is that of `given` or `base`, plus `names`.

    Raises:
        UserError: If an option does not exist, or does not accept its value.
    """
    first = given if isinstance(given, Mapping) else base
    parser = parser_of(verb)
    named: list[str] = [*((first or {}).get("config") or []), *names]
    before = None
    try:
        if first is not None:
            before = parser.parse_object(
                {name: value for name, value in copy.deepcopy({**first}).items() if name != "config"}
            )
        read = before if isinstance(given, Mapping) else parser.parse_args(given, before)
    except Exception as error:
        parser_of.cache_clear()  # a parser keeps a --print_config that an error beside it left unprinted
        if not isinstance(error, ArgumentError):
            raise
        options = [] if isinstance(given, Mapping) else [*given]
        files = [file for option, file in pairwise(options) if option == "--config" and file[:1] != "{"] or named
        raise UserError(_explain(error.message, verb, files, options) + see) from error
    assert read is not None
    if not isinstance(seed := read.seed_everything, bool | None):
        check_number("--seed_everything", seed, at_least=0, below=2**32, whole=True)
    text = parser.dump(read, skip_unset=False, skip_validation=True)  # they have been checked
    config: Config = yaml_text.load(text, "the configuration")
    for part in (config["model"], config["data"]):
        if isinstance(part, dict):
            part.setdefault("init_args", {})  # for a class without options
    return {**config, "config": named}


def _explain(message: str, verb: str, files: Sequence[str], options: Sequence[str]) -> str:
    if not files and "are required" in message:
        return NO_CONFIG.format(verb, "quickstart" if verb == "fit" else "RUN/config.yaml --ckpt_path RUN")
    text = readable(message).replace("parsing config", f"parsing config {', '.join(files)}")
    if (unknown := UNKNOWN.search(message)) and text.endswith("."):  # no similar option exists
        name = next(group for group in unknown.groups() if group).rpartition(".")[2]
        if files and not any(option.partition("=")[0].endswith(name) for option in options):
            text += f" If another version of linvit or another task wrote it, remove it from {files[-1]}"
    return text


def config_text(config: Mapping[str, Any]) -> str:
    """Returns a configuration as the text of a file for `--config`."""
    saved = {name: value for name, value in config.items() if name != "config"}
    return f"# lightning.pytorch=={version('lightning')}\n{yaml_text.dump(saved)}"


def _fact(name: str) -> Callable[[ImageData], Any]:
    def fact(data: ImageData) -> Any:
        return getattr(data, name)

    fact.__name__ = name  # which the help has
    return fact


def instantiate(config: Mapping[str, Any], **classes: type) -> Namespace:
    """Returns instances of sections of a configuration, such as `data=ImageData`; for the trainer, of its options."""
    parser = _parser_of_sections(**classes)
    try:
        built: Namespace = parser.instantiate(parser.parse_object({name: config[name] for name in classes}))
    except (ValueError, ImportError) as error:
        reason = error.__cause__ or error  # jsonargparse 4 wraps it in an error with the whole configuration
        if isinstance(reason, ImportError) or isinstance(reason.__cause__, ImportError):  # a logger's package
            raise UserError(str(reason)) from error
        raise reason from reason.__cause__
    return built


@cache
def _parser_of_sections(**classes: type) -> Parser:
    parser = Parser()
    for section, owner in classes.items():
        parser.add_lightning_class_args(owner, section, subclass_mode=owner is ImageData)
    return parser


def build_task(model: Mapping[str, Any], **facts: Any) -> Task:
    """Returns the task that the `model` section of a configuration describes.

    Its options are plain data and may come from a checkpoint: they are passed to the task unchanged. The parser would
    call any function that a mapping with a `class_path` names, at any depth.
    """
    task: type[Task] = pkgutil.resolve_name(model["class_path"])
    options = copy.deepcopy({**model.get("init_args", {}), **model.get("dict_kwargs", {})}) | facts
    for name, value in options.items():
        if reason := not_plain(value):
            raise UserError(f"--model.{name} holds {reason}. It takes text, numbers, lists and mappings of them")
    return task(**options)


# Lines in which jsonargparse explains its types rather than the user's mistake.
NOISE = re.compile(
    r"(Does not validate|Subtypes|Errors|Given value type|Given value: (\[?Namespace|NestedArg|\{)|"
    r"Subclass types expect|a class path \(str\)|a dict with|"
    r"Expected a <class 'NoneType'>|See .*--help)"
)
TOP = (
    "config",
    "base",
    "resume",
    "seed_everything",
    "ckpt_path",
    "requeue_exit_code",
    "attention_rank",
    "print_config",
    "model",
    "data",
)
CLOSE = 0.7  # similarity of two names, as computed by difflib
OTHER_NAMES = {  # names of these options in other programs
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
    """Returns the error in a configuration, from jsonargparse's message, and the nearest option that exists."""
    lines = [re.sub(r"^\s*- ", "  ", line) for line in message.splitlines()]
    text = "\n".join(TYPE.sub(r"\1\2", line) for line in lines if line.strip() and not NOISE.match(line.strip()))
    unknown = UNKNOWN.search(message)
    if unknown is None:
        return text
    given = next(group for group in unknown.groups() if group).replace("-", "_").replace("init_args.", "")
    given = given.removesuffix(".class_path")
    owner = pkgutil.resolve_name(owners[-1]) if (owners := CLASS_PATH.findall(message)) else None
    if removed := answer(given, getattr(owner, "__name__", "")):
        return f"--{removed}"
    return f"{text}.{_suggestion(given, owner if isinstance(owner, type) else None)}"


def _suggestion(given: str, owner: type | None) -> str:
    """Returns a sentence with the option to type instead of one that does not exist; empty if none is similar."""
    part = given.partition(".")[0]
    if owner is not None:
        part = "model" if issubclass(owner, Task) else "data" if issubclass(owner, ImageData) else ""
        if not part:  # a callback in a list, whose options cannot be set by flags
            return did_you_mean(given, options_of(owner))
    parts: dict[str, Iterable[type]] = {"model": subclasses(Task), "data": subclasses(ImageData)}
    if owner is not None:  # another class's option of the same name would be suggested
        parts[part] = [owner]
    parts |= {"trainer": [Trainer], "checkpoint": [SaveCheckpoints], "non_finite": [NonFiniteGuard]}
    options = [f"{name}.{option}" for name, owners in parts.items() for one in owners for option in options_of(one)]
    known: dict[str, str] = {}
    for option in sorted([*TOP, *options], key=lambda option: not option.startswith(part)):
        if option.partition("model.")[2] not in SET_BY_DATA:
            known.setdefault(option.rpartition(".")[2], option)
    leaf = given.rpartition(".")[2]
    known |= OTHER_NAMES
    near = difflib.get_close_matches(leaf, known, 1, CLOSE)
    return f" Did you mean --{known[near[0]]}?" if near else ""


class Option(NamedTuple):
    """An option."""

    default: Any
    help: str
    type: Any


@cache
def options_of(owner: type) -> dict[str, Option]:
    """Returns options by name; those of a nested dataclass as `augmentation.hflip`."""
    found = {}

    class Listed(DefaultHelpFormatter):
        """Help formatter, the only place where a parser exposes its options."""

        def add_argument(self, action: argparse.Action) -> None:
            if action.default != argparse.SUPPRESS:  # of --help, and of a nested dataclass as a whole
                found[action.dest] = Option(
                    action.default, action.help or "", getattr(action, "_typehint", action.type)
                )

    parser = ArgumentParser(formatter_class=Listed)
    with warnings.catch_warnings():  # version 5 calls parameters without a type required; here they are only listed
        warnings.filterwarnings("ignore", r"\s*With fail_untyped=False")
        parser.add_class_arguments(owner, fail_untyped=False)
    parser.format_help()
    return found
