"""What users type and import, in one file that a change of it edits: `python -m tests.test_surface` writes it anew."""

import contextlib
import io
import re
from pathlib import Path

import linvit
from linvit import data, tasks
from linvit.cli import OWN, main
from linvit.cli.training import VERBS
from linvit.data.base import ImageData
from linvit.runs.options import read_config
from linvit.runs.parser import options_of
from linvit.tasks.base import Task

FILE = Path(__file__).parent / "surface.txt"
WORDS = {"bench": ("attention", "backbone"), "data": ("check", "tile")}
"""Verbs that another word follows."""


def help_of(*words: str) -> str:
    """Returns what `linvit WORDS --help` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return out.getvalue()


def commands() -> dict[str, list[str]]:
    """Returns the options of verbs that do not train."""
    alone = [(verb,) for verb in OWN if verb not in (*VERBS, *WORDS)]
    with_words = [(verb, word) for verb, words in WORDS.items() for word in words]
    listed = re.compile(r"^ +(?:-\w, |-\w \w+, )?(--\w[\w-]*)", re.MULTILINE)
    return {
        f"linvit {' '.join(words)}": sorted({*listed.findall(help_of(*words))} - {"--help"})
        for words in [*alone, *with_words]
    }


def keys() -> dict[str, list[str]]:
    """Returns the keys of a configuration: those of every run, and by class those of its task and data."""
    sections = ("trainer", "model", "data")  # Lightning's, and those of classes
    settings = read_config("quickstart")
    every = [name for name in settings if name not in sections]
    parts = {name: options_of(type_) for name, type_ in classes().items()}
    return {"configuration": sorted(every), **{name: sorted(options) for name, options in parts.items()}}


def classes() -> dict[str, type]:
    """Returns linvit's own tasks and data modules."""
    own = {
        **{name: getattr(tasks, name) for name in tasks.__all__},
        **{name: getattr(data, name) for name in data.__all__},
    }
    return {name: one for name, one in own.items() if isinstance(one, type) and issubclass(one, Task | ImageData)}


def surface() -> str:
    """Returns the names, verbs, options and keys, one a line."""
    parts = {"import linvit": linvit.__all__, "verbs": sorted(OWN), **dict(sorted(commands().items())), **keys()}
    return "\n".join("\n".join([title, *(f"  {name}" for name in names)]) for title, names in parts.items()) + "\n"


def test_names_verbs_options_and_keys_change_on_purpose():
    assert surface() == FILE.read_text(encoding="utf-8"), (
        "if on purpose: python -m tests.test_surface; see CONTRIBUTING"
    )


if __name__ == "__main__":
    FILE.write_text(surface(), encoding="utf-8")
