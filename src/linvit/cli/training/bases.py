"""Configurations that start from others: the files under a configuration's `base:` are read before it."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import jsonargparse

from linvit.cli.configs import config_file, find, near
from linvit.errors import UserError

FLAG, SHORT = "--config", "-c"


def with_bases(argv: Sequence[str]) -> list[str]:
    """Replaces every `--config NAME` of a command line by the files that it names under `base:`, then its own file.

    Bases may have bases, too. Later files win, key by key, so that a file need only hold what differs. At the end
    `base` itself is set to null: the merged configuration is complete, wherever it is saved.

    Raises:
        UserError: If a configuration or a base is missing, or a file is, in the end, its own base.
    """
    expanded: list[str] = []
    for argument, config in _arguments(argv):
        expanded += [argument] if config is None else _chain(config_file(config), ())
    merged = expanded.count(FLAG) > len(configs(argv))
    return [*expanded, "--base=null"] if merged else expanded


def configs(argv: Sequence[str]) -> list[str]:
    """The configurations that a command line names, in order."""
    return [config for _, config in _arguments(argv) if config is not None]


def _arguments(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """The arguments of a command line, each with the configuration that it names, `--config NAME` as one."""
    arguments = iter(argv)
    for argument in arguments:
        if argument in (FLAG, SHORT):
            yield argument, next(arguments, "")
        else:
            yield argument, argument.removeprefix(f"{FLAG}=") if argument.startswith(f"{FLAG}=") else None


def _chain(path: Path, below: tuple[Path, ...]) -> list[str]:
    """`--config` for the bases of a file, then for itself."""
    if path.resolve() in below:
        circle = " -> ".join(map(str, (*below, path)))
        raise UserError(f"configuration '{path}' is its own base: {circle}. Take one of them out of 'base:'")
    bases = [part for base in _bases(path) for part in _chain(base, (*below, path.resolve()))]
    return [*bases, FLAG, str(path)]


def _bases(path: Path) -> list[Path]:
    """The files under `base:`, by paths relative to the file that names them, or by names of linvit's.

    What is no YAML mapping the parser reports.
    """
    try:
        content = jsonargparse.get_loader("yaml")(path.read_text(encoding="utf-8"))
    except Exception:  # whatever is wrong with it
        return []
    named = content.get("base") if isinstance(content, dict) else None
    given = [named] if isinstance(named, str) else named or []
    if not isinstance(given, list) or not all(isinstance(base, str) for base in given):
        raise UserError(f"'base:' of configuration '{path}' must be a file or a list of files; got {named!r}")
    found = {base: find(base, path.parent) for base in given}
    for base, file in found.items():
        if file is None:
            raise UserError(
                f"configuration '{path}' starts from '{path.parent / base}', which does not exist; mend its 'base:'."
                f"{near(base)}"
            )
    return [file for file in found.values() if file is not None]
