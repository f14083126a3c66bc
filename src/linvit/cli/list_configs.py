"""`linvit list configs`: the configurations that come with linvit, one of them in full, or a copy of it."""

import shlex
from fnmatch import fnmatchcase
from pathlib import Path

from linvit.cli.configs import config_file, heading, names, shipped
from linvit.cli.terminal import table
from linvit.errors import UserError

LONGEST = 40  # characters of what is expected: beside it stand names, in 80 columns


def overview(pattern: str) -> list[str]:
    """A table of the experiments whose names match a wildcard pattern, and one of the parts that experiments share."""
    chosen = [name for name in names() if fnmatchcase(name, pattern)]
    if not chosen:
        return ["configs", f"  none of {len(names())} is like '{pattern}'"]
    texts = {name: config_file(name).read_text(encoding="utf-8") for name in chosen}
    fields = {name: found for name in chosen if "Paper" in (found := heading(texts[name]))}
    rows = [(f"  {name}", _expected(found["Expected"]), found["Paper"]) for name, found in fields.items()]
    lines = table([("configs", "expected", "paper"), *rows]) if rows else []
    parts = [(f"  {name}", _sentence(texts[name])) for name in chosen if name not in fields]
    titles = ("parts, for base: or a second --config", "")
    return lines + [""] * bool(lines and parts) + (table([titles, *parts]) if parts else [])


def one(name: str, output: Path | None) -> str:
    """The text of a configuration; with `output` it is written there, and the answer says how to go on.

    Raises:
        UserError: If there is no such configuration, or the file cannot be written.
    """
    path = shipped(name) or config_file(name)
    text = path.read_text(encoding="utf-8")
    if output is None:
        return text.rstrip("\n")
    if output.exists():
        raise UserError(f"'{output}' is there already. Name another file")
    if not output.absolute().parent.is_dir():
        raise UserError(f"there is no folder '{output.parent}' to write '{output.name}' to. Make it first")
    output.write_text(text, encoding="utf-8")
    verb = "compare" if "linvit compare" in heading(text).get("Command", "") else "fit --config"
    return f"wrote {output}: change it, then train with\n  linvit {verb} {shlex.quote(str(output))}"


def _expected(text: str) -> str:
    """What is expected of an experiment, without what stands in parentheses; if that is long, its first part."""
    text = text.partition(" (")[0]
    return text if len(text) <= LONGEST else text.partition(";")[0]


def _sentence(text: str) -> str:
    """The first sentence of the opening comment."""
    comment = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    return comment.partition(". ")[0].rstrip(".")
