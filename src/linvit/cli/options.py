"""Converts command-line options of `linvit fit` and related verbs to a configuration."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from linvit.errors import UserError
from linvit.runs import yaml_text
from linvit.runs.configs import expand

if TYPE_CHECKING:
    from linvit.runs.parser import Config

FLAG, SHORT = "--config", "-c"
RESUME_AND_CHECKPOINT = "--resume=auto finds the checkpoint: remove --ckpt_path, or --resume"


def read_options(verb: str, argv: Sequence[str], base: Mapping[str, Any] | None = None, *, see: str = "") -> "Config":
    """Returns the complete configuration of a command line.

    Args:
        verb: fit, validate, test or predict.
        argv: Its arguments, without the verb.
        base: A complete configuration that the arguments modify.
        see: Sentence that is added to errors, such as the command of the help.
    """
    from linvit.runs.parser import parse  # takes seconds to import

    given = [argument.partition("=")[0] for argument in argv]
    if verb == "fit" and "--resume" in given and "--ckpt_path" in given:
        raise UserError(RESUME_AND_CHECKPOINT)
    # --print_config last, or jsonargparse prints at the end of the first file
    options = sorted(argv, key=lambda option: option.startswith("--print_config"))
    return parse(verb, with_bases(options), base, configs(argv), see)


def with_bases(argv: Sequence[str]) -> list[str]:
    """Replaces every `--config NAME` of a command line by its files, including bases.

    Finally sets `base` to null: the merged configuration is complete and can be saved anywhere.
    """
    expanded: list[str] = []
    for argument, config in arguments(argv):
        if config is None:
            yaml_text.check(argument.partition("=")[2] or argument, f"'{argument[:40]}'")
            expanded.append(argument)
        else:
            expanded += [part for text in expand(config) for part in (FLAG, text)]
    merged = expanded.count(FLAG) > len(configs(argv))
    return [*expanded, "--base=null"] if merged else expanded


def configs(argv: Sequence[str]) -> list[str]:
    """Returns the configurations of a command line, in order."""
    return [config for _, config in arguments(argv) if config is not None]


def arguments(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yields the arguments of a command line, each with the configuration that it names, `--config NAME` as one."""
    arguments = iter(argv)
    for argument in arguments:
        if argument in (FLAG, SHORT):
            yield argument, next(arguments, "")
        else:
            yield argument, argument.removeprefix(f"{FLAG}=") if argument.startswith(f"{FLAG}=") else None
