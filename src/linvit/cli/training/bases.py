"""Configurations that start from others: the files under a configuration's `base:` are read before it."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import jsonargparse

from linvit.errors import UserError

FLAG = "--config"


def with_bases(argv: Sequence[str]) -> list[str]:
    """A command line whose every `--config FILE` follows the files that FILE names under `base:`, theirs included.

    What a later file says wins, key by key, so that a file need only hold what differs. In the end `base` itself is
    taken back: what is merged stands by itself, wherever it is saved.

    Raises:
        UserError: If a base is missing or a file is, in the end, its own base.
    """
    expanded: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument == FLAG:
            expanded += _chain(Path(next(arguments, "")), ())
        elif argument.startswith(f"{FLAG}="):
            expanded += _chain(Path(argument.removeprefix(f"{FLAG}=")), ())
        else:
            expanded.append(argument)
    merged = expanded.count(FLAG) > len(configs(argv))
    return [*expanded, "--base=null"] if merged else expanded


def configs(argv: Sequence[str]) -> list[str]:
    """The files that a command line names itself."""
    named = [argument.removeprefix(f"{FLAG}=") for argument in argv if argument.startswith(f"{FLAG}=")]
    return named + [after for flag, after in pairwise(argv) if flag == FLAG]


def _chain(path: Path, below: tuple[Path, ...]) -> list[str]:
    """`--config` for the bases of a file, then for itself."""
    if path.resolve() in below:
        circle = " -> ".join(map(str, (*below, path)))
        raise UserError(f"configuration '{path}' is its own base: {circle}. Take one of them out of 'base:'")
    chain: list[str] = []
    for base in _bases(path):
        if not base.is_file():
            raise UserError(f"configuration '{path}' starts from '{base}', which does not exist; mend its 'base:'")
        chain += _chain(base, (*below, path.resolve()))
    return [*chain, FLAG, str(path)]


def _bases(path: Path) -> list[Path]:
    """The files under `base:`, relative to the file that names them. What is no YAML mapping the parser reports."""
    try:
        content = jsonargparse.get_loader("yaml")(path.read_text())
    except Exception:  # whatever is wrong with it
        return []
    named = content.get("base") if isinstance(content, dict) else None
    files = [named] if isinstance(named, str) else named or []
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise UserError(f"'base:' of configuration '{path}' must be a file or a list of files; got {named!r}")
    return [path.parent / file for file in files]
