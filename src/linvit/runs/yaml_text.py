"""YAML from a file or the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from linvit.errors import UserError
from linvit.io.reading import read_text

MAX_BYTES = 10 * 2**20  # of a file


def read(path: Path) -> str:
    """The text of a YAML file."""
    try:
        return read_text(path, MAX_BYTES)
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not a configuration: it is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise UserError(f"'{path}' is not a configuration: {error.strerror}") from error


def load(text: str) -> Any:
    """The value of a YAML text, read as a configuration is: `1e-6` is a number."""
    import jsonargparse  # `linvit list` reads the tables of configurations without it

    return jsonargparse.get_loader("yaml")(text)


def dump(value: Any) -> str:
    """Returns a value as YAML text, as `--print_config` prints it."""
    return str(yaml.safe_dump(value, default_flow_style=False, allow_unicode=True, sort_keys=False))


def mapping(path: Path, loader: Callable[[str], Any] = load) -> dict[str, Any]:
    """Returns the content of a configuration; raises a `UserError` if it cannot be read, or is not a mapping."""
    try:
        content = loader(read(path))
    except (yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        raise UserError(f"'{path}' cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise UserError(f"'{path}' is not the configuration of a run")
    return content


class _Tuples(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Lightning writes tuples to hparams.yaml."""


_Tuples.add_constructor("tag:yaml.org,2002:python/tuple", lambda loader, node: loader.construct_sequence(node, True))


def load_with_tuples(text: str) -> Any:
    """The same of a file that Lightning has written, in which a tuple has a tag; it becomes a list."""
    return yaml.load(text, _Tuples)
