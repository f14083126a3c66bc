"""Options of configurations and checkpoints that this release has removed, and what to use instead.

A value that changed nothing is left out, so runs of earlier versions can be resumed and scored. Any other value is
refused with one line. `linvit.cli.removed` has the verbs and options of command lines. The next minor release drops
the rows of this one.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from linvit.errors import UserError


class Removed(NamedTuple):
    """An option that was removed."""

    default: Any
    """The value that changed nothing."""
    instead: str
    owner: str = ""
    """The class of linvit that had the option, where other classes in the same place may have one of this name."""


RECALL = "Use diagnostics/recall, or linvit 0.2 for the tasks copy, counting, nearest and distractors"
OPTIONS = {
    "data.distance": Removed(1, RECALL, "DiagnosticData"),
    "data.distractors": Removed(0, "Use data.pairs: a query asks for each pair", "DiagnosticData"),
    "data.source=copy": Removed(None, RECALL, "DiagnosticData"),
    "data.source=counting": Removed(None, RECALL, "DiagnosticData"),
    "data.source=nearest": Removed(None, RECALL, "DiagnosticData"),
}
"""Removed options by dotted names without `init_args`, such as `data.distance` and `trainer.callbacks.every`.

An option may have one of its values, `data.source=copy`, where only that is removed.
"""
CONFIGS = {f"diagnostics/{name}": RECALL for name in ("copy", "counting", "distractors", "locality", "nearest")}
"""What to use instead of a configuration that came with linvit, by its name."""


def without_removed(config: Mapping[str, Any], source: str, section: str = "") -> dict[str, Any]:
    """Returns a configuration, or a section of one, without removed options that changed nothing.

    Raises:
        UserError: If a removed option has another value. It names `source`, the option, and what to use instead.
    """

    def kept(part: Any, name: str, owner: str) -> Any:
        if isinstance(part, list):
            return [kept(each, name, owner) for each in part]
        if not isinstance(part, dict):
            return part
        owner, found = str(part.get("class_path", owner)), {}
        for key, value in part.items():
            option = name if key == "init_args" else f"{name}.{key}".removeprefix(".")
            names = (option, f"{option}={value}") if isinstance(value, str) else (option,)
            gone = next((one for one in names if _had(owner, one)), None)
            if gone is None:
                found[key] = kept(value, option, owner)
            elif value != OPTIONS[gone].default:
                raise UserError(f"{source}: {option}={value!r}. {answer(gone)}")
        return found

    return dict(kept({**config}, section, ""))


def answer(option: str, owner: str = "") -> str | None:
    """Returns the sentence that answers a removed option, which may lack its section if its class is given; or None."""
    for name, row in OPTIONS.items():
        same = name == option or (owner and name.endswith(f".{option}"))
        if same and (not owner or row.owner in ("", owner)):
            return f"{name} was removed. {row.instead}"
    return None


def _had(owner: str, option: str) -> bool:
    """True if the class of a path, which may be its bare name, had an option that was removed."""
    row = OPTIONS.get(option)
    if row is None or not row.owner:
        return row is not None
    return owner.rpartition(".")[2] == row.owner and owner.partition(".")[0] in ("linvit", row.owner)
