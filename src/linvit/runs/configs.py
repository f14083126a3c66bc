"""Configurations by path, or by the name of one that comes with linvit, and those that they start from."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from linvit import yaml_text
from linvit.errors import UserError, did_you_mean
from linvit.model_info import CONFIGS
from linvit.runs.recipes import recipes

FLAG, SHORT = "--config", "-c"
FIELD = re.compile(r"^# (\w+):\s+(.*)$", re.MULTILINE)


def names() -> list[str]:
    """Names of the configurations that come with linvit, such as `quickstart` and `imagenet/swin_tiny`, sorted."""
    files = (path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml"))
    return sorted([*files, *recipes()])


def shipped(name: str) -> Path | None:
    """The file of a configuration that comes with linvit, or None; `.yaml` may be left out.

    A recipe that is the row of a table has a path as if it were a file, which `text` reads.
    """
    name = name.removesuffix(".yaml").removeprefix(f"{CONFIGS.as_posix()}/")
    return CONFIGS / f"{name}.yaml" if name in names() else None


def find(given: str, folder: Path | None = None) -> Path | None:
    """The file that a path or a name means: the file at the path, else one that comes with linvit, else None."""
    path = Path(given) if folder is None else folder / given
    return path if path.is_file() else shipped(given)


def text(path: Path) -> str:
    """The text of a configuration that `find` has found."""
    name = path.relative_to(CONFIGS).with_suffix("").as_posix() if path.is_relative_to(CONFIGS) else ""
    return recipes().get(name) or yaml_text.read(path)


def config_file(given: str) -> Path:
    """The same as `find`."""
    path = find(given)
    if path is None:
        raise UserError(f"no configuration is called '{given}', and there is no such file.{near(given)}")
    return path


def near(given: str) -> str:
    """Names the nearest configuration that comes with linvit, and the command that lists all."""
    name = given.removesuffix(".yaml").rpartition("configs/")[2]
    return f"{did_you_mean(name, names())} linvit list configs names those that come with linvit"


def heading(text: str) -> dict[str, str]:
    """The fields in the opening comment of a configuration, such as `# Paper: ...`; the first line of each."""
    return dict(FIELD.findall(text))


def with_bases(argv: Sequence[str]) -> list[str]:
    """Replaces every `--config NAME` of a command line by the files that it names under `base:`, then its own file.

    Bases may have bases, too. Later files win, key by key, so that a file need only hold what differs. A base of
    several files is read once, before the first of them. At the end `base` itself is set to null: the merged
    configuration is complete, wherever it is saved.
    """
    expanded: list[str] = []
    for argument, config in arguments(argv):
        if config is None:
            yaml_text.check(argument.partition("=")[2] or argument, f"'{argument[:40]}'")
            expanded.append(argument)
        else:
            expanded += [part for path in chain(config_file(config)) for part in (FLAG, _argument(path))]
    merged = expanded.count(FLAG) > len(configs(argv))
    return [*expanded, "--base=null"] if merged else expanded


def _argument(path: Path) -> str:
    """What the parser takes for a configuration: its path, or the content of the row of a table."""
    return str(path) if path.is_file() else json.dumps({**yaml_text.load(text(path), f"'{path}'"), "base": None})


def chain(path: Path, seen: set[Path] | None = None) -> list[Path]:
    """The bases of a file, with theirs, and then itself; each once, at its first place."""
    seen = set() if seen is None else seen
    if (own := path.resolve()) in seen:
        return []
    seen.add(own)
    return [*(file for base in _bases(path) for file in chain(base, seen)), path]


def configs(argv: Sequence[str]) -> list[str]:
    """The configurations that a command line names, in order."""
    return [config for _, config in arguments(argv) if config is not None]


def arguments(argv: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """The arguments of a command line, each with the configuration that it names, `--config NAME` as one."""
    arguments = iter(argv)
    for argument in arguments:
        if argument in (FLAG, SHORT):
            yield argument, next(arguments, "")
        else:
            yield argument, argument.removeprefix(f"{FLAG}=") if argument.startswith(f"{FLAG}=") else None


def _bases(path: Path) -> list[Path]:
    """The files under `base:`, by paths relative to the file that names them, or by names of linvit's."""
    try:
        content = yaml_text.load(text(path), f"'{path}'")
    except yaml.YAMLError:
        return []
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"'{path}' is not a configuration: {error}") from error
    named = content.get("base") if isinstance(content, dict) else None
    given = [named] if isinstance(named, str) else named or []
    if not isinstance(given, list) or not all(isinstance(base, str) for base in given):
        raise UserError(f"'base:' of configuration '{path}' must be a file or a list of files; got {named!r}")
    found = {base: find(base, path.parent) for base in given}
    for base, file in found.items():
        if file is None:
            raise UserError(
                f"configuration '{path}' starts from '{path.parent / base}', which does not exist; correct its 'base:'."
                f"{near(base)}"
            )
    return [file for file in found.values() if file is not None]
