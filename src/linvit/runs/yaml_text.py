"""YAML from a file or the command line, checked before anything is built from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from linvit.errors import UserError
from linvit.io.reading import read_text

MAX_BYTES = 10 * 2**20  # maximum size of a file
MAX_DEPTH = 100  # maximum nesting of lists and mappings; at about 50,000 the loader overflows the stack
MAX_VALUES = 100_000  # after all aliases are expanded
SHORT = 2 * MAX_DEPTH  # number of characters below which a text can be neither deep nor large


def read(path: Path) -> str:
    """Returns the text of a YAML file."""
    try:
        return read_text(path, MAX_BYTES)
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not a configuration: it is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise UserError(f"'{path}' is not a configuration: {error.strerror}") from error


def load(text: str, what: str) -> Any:
    """Returns the value of a YAML text, read as in a configuration: `1e-6` is a number."""
    check(text, what)
    import jsonargparse  # `linvit list` reads the tables of configurations without it

    return jsonargparse.get_loader("yaml")(text)


def dump(value: Any) -> str:
    """Returns a value as YAML text, as `--print_config` prints it."""
    return str(yaml.safe_dump(value, default_flow_style=False, allow_unicode=True, sort_keys=False))


def mapping(path: Path, loader: Callable[[str, str], Any] = load) -> dict[str, Any]:
    """Returns the content of a configuration; raises a `UserError` if it cannot be read, or is not a mapping."""
    try:
        content = loader(read(path), f"'{path}'")
    except (yaml.YAMLError, OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise UserError(f"'{path}' is not the configuration of a run")
    return content


class _Tuples(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Loader for the tuples that Lightning writes to hparams.yaml."""


_Tuples.add_constructor("tag:yaml.org,2002:python/tuple", lambda loader, node: loader.construct_sequence(node, True))


def load_with_tuples(text: str, what: str) -> Any:
    """Does the same for a file that Lightning has written, in which tuples have a tag; they become lists."""
    check(text, what)
    return yaml.load(text, _Tuples)


def check(text: str, what: str) -> None:
    """Raises a `UserError` if a text nests too deeply or expands to too many values; the loader reports YAML errors."""
    if len(text) < SHORT and "*" not in text:
        return
    open_: list[tuple[str | None, int]] = [(None, 0)]  # the anchor of each open list or mapping, and its values so far
    sizes: dict[str | None, int] = {}  # values below each anchor
    try:
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            match event:
                case yaml.CollectionStartEvent(anchor=anchor):
                    open_.append((anchor, 1))
                    if len(open_) > MAX_DEPTH:
                        raise UserError(f"{what} nests lists and mappings more than {MAX_DEPTH} deep")
                    continue
                case yaml.CollectionEndEvent():
                    anchor, size = open_.pop()
                    sizes[anchor] = size
                case yaml.AliasEvent(anchor=anchor):
                    if anchor in dict(open_):
                        raise UserError(f"{what} repeats '&{anchor}' within itself, by '*{anchor}'")
                    size = sizes.get(anchor, 1)
                case yaml.ScalarEvent(value=value):
                    if value[:1] in ("[", "{"):  # the parser also reads such text as YAML
                        check(value, what)
                    size = 1
                case _:
                    continue
            outer, count = open_[-1]
            open_[-1] = outer, count + size
            if count + size > MAX_VALUES:
                raise UserError(f"{what} holds more than {MAX_VALUES:,} values, repetitions by * included")
    except yaml.YAMLError:
        return
