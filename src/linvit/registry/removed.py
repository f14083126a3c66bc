"""Names that this release has removed, and their replacements; the next minor release drops these rows.

In configurations and checkpoints, a value that had no effect is left out, so runs of earlier versions can be resumed
and scored. Any other value raises a one-line error, as do verbs and options of command lines.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from linvit.errors import UserError


class Removed(NamedTuple):
    """Removed option."""

    default: Any
    """Value that had no effect."""
    instead: str
    owner: str = ""
    """Class of linvit that had the option, if other classes in the same place may have an option of this name."""


RECALL = "Use diagnostics/recall, or linvit 0.2 for the tasks copy, counting, nearest and distractors"
SEARCH = "Use --tune OPTION=VALUE,VALUE, or a loop of Optuna around linvit fit (docs/guides/search.md)"
BUDGET = "Use equal epochs, --trainer.max_epochs=N, or a grid whose variants set different epochs"
LEVEL = "Use the curves in TensorBoard or metrics.csv, which show when a score is reached"
OPTIONS = {
    "compare.budget": Removed("epochs", BUDGET, "compare"),
    "compare.level": Removed(None, LEVEL, "compare"),
    "compare.search": Removed("grid", SEARCH, "compare"),
    "compare.trials": Removed(20, SEARCH, "compare"),
    "data.distance": Removed(1, RECALL, "DiagnosticData"),
    "data.distractors": Removed(0, "Use data.pairs: a query asks for each pair", "DiagnosticData"),
    "data.source=copy": Removed(None, RECALL, "DiagnosticData"),
    "data.source=counting": Removed(None, RECALL, "DiagnosticData"),
    "data.source=nearest": Removed(None, RECALL, "DiagnosticData"),
}
"""Removed options by dotted names without `init_args`, such as `data.distance` and `trainer.callbacks.every`.

Keys of the grids of `linvit compare` are `compare.KEY`. An option may have one of its values, `data.source=copy`, where
only that is removed.
"""
CONFIGS = {f"diagnostics/{name}": RECALL for name in ("copy", "counting", "distractors", "locality", "nearest")}
"""Replacements of removed configurations that came with linvit, by their names."""
COMMANDS = {
    "bench --roofline": "Use benchmarks/roofline.py of linvit's repository, on a machine with a GPU",
    "bench data": "Use benchmarks/loading.py of linvit's repository, which measures the same",
    "check --head": "Use a test of a few lines with linvit.create_segmentor or create_detector (tests/plugin has two)",
    "check --timeout": "Use timeout 60 linvit check NAME: plug-ins are imported in the process of the check",
    **{name.replace(".", " --"): row.instead for name, row in OPTIONS.items() if row.owner == "compare"},
    "doctor": "Use pip check, which names packages that do not fit, and python -m torch.utils.collect_env",
    "export --int8": "Use torchao on the network of linvit.load (docs/guides/export.md, 8 bits)",
    "leaderboard": "Use linvit compare --report FOLDER..., which makes one table of the runs in all folders",
    "linearize --keep": "Use --budget softmax=N, which finds the N blocks that keep softmax (docs/guides/linearize.md)",
    "probe --epochs": "Use linvit probe without it: the linear classifier is trained to convergence",
    "verify-resume": "Use linvit fit --resume=auto: a run resumes exactly (docs/guides/train.md)",
}
"""Replacements of a removed `VERB`, `VERB WORD`, `VERB --option`, or `--option` of all verbs: one line each.

An option may have one of its values, `VERB --option=value`, where only that is removed.
"""


def without_removed(config: Mapping[str, Any], source: str, section: str = "") -> dict[str, Any]:
    """Returns a configuration, or a section of one, without removed options that had no effect.

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

    return dict(kept({**config}, section, section))


def answer(option: str, owner: str = "") -> str | None:
    """Returns the sentence about a removed option, given without its section if its class is given; else None."""
    for name, row in OPTIONS.items():
        same = name == option or (owner and name.endswith(f".{option}"))
        if same and (not owner or row.owner in ("", owner)):
            return f"{name} was removed. {row.instead}"
    return None


def _had(owner: str, option: str) -> bool:
    """Returns True if the class of a path, which may be a bare name, had an option that was removed."""
    row = OPTIONS.get(option)
    if row is None or not row.owner:
        return row is not None
    return owner.rpartition(".")[2] == row.owner and owner.partition(".")[0] in ("linvit", row.owner)


def check_removed(argv: Sequence[str]) -> None:
    """Raises a `UserError` that names the replacement if a command has a removed verb or option."""
    for name in _names(argv):
        if name in COMMANDS:
            raise UserError(f"{name if name.startswith('--') else f'linvit {name}'} was removed. {COMMANDS[name]}")


def _names(argv: Sequence[str]) -> Iterator[str]:
    """Yields the keys that the table may have for a command, such as `bench`, `bench data` and `bench --level`."""
    verb, *words = argv or [""]
    yield verb
    for place, (word, following) in enumerate(zip(words, [*words, ""][1:], strict=True)):
        if not place or word.startswith("--"):
            for name in (word.partition("=")[0], word, f"{word}={following}"):
                yield f"{verb} {name}"
                yield name * name.startswith("--")
