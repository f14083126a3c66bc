"""Values of an option that differs: how a command line lists them, what patterns stand for, and short names of them."""

import itertools
from collections.abc import Sequence
from typing import Any

from linvit.errors import UserError
from linvit.registry import attentions, backbones, heads

REGISTRIES = {"attention": attentions, "backbone": backbones, "head": heads}


def expand_names(key: str, values: Sequence[Any]) -> list[Any]:
    """Values of an option with the registered names in the place of a pattern: `model.attention: ["*"]` is all of them.

    Raises:
        UserError: If no name fits a pattern.
    """
    registry = REGISTRIES.get(key.rpartition(".")[2])
    found: list[Any] = []
    for value in values:
        if registry is None or not (isinstance(value, str) and "*" in value):
            found.append(value)
        elif names := registry.names(value):
            found += names
        else:
            raise UserError(f"no registered name fits {key}={value!r}: linvit list has them")
    return found


def value_label(key: str, value: Any) -> str:
    """A short name of a value: `softmax`, `focused-focusing_factor4`, `lr0.001`, `window_size7`."""
    match value:
        case str():
            return value
        case {"name": str(name), **options}:
            return "-".join([name, *(f"{option}{_plain(given)}" for option, given in options.items())])
        case [*values] if any(isinstance(entry, str | dict) for entry in values):
            runs = [
                (name, len(list(same))) for name, same in itertools.groupby(value_label("", entry) for entry in values)
            ]
            return "-".join(f"{count}{name}" if count > 1 else name for name, count in runs)
        case _:
            return f"{key.rpartition('.')[2]}{_plain(value)}"


def split(text: str) -> list[str]:
    """The values of an option: parts between commas that stand outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _plain(value: Any) -> str:
    match value:
        case [*values]:
            return "-".join(map(_plain, values))
        case dict():
            return "-".join(f"{key}{_plain(entry)}" for key, entry in value.items())
        case bool() | None:
            return {True: "-true", False: "-false", None: "-null"}[value]
        case _:
            return f"-{value}" if isinstance(value, str) else f"{value}"
