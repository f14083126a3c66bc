"""What was removed is answered by one line that names the replacement."""

import re

import pytest

from linvit.cli import OWN, main
from linvit.errors import UserError
from linvit.registry import removed
from linvit.registry.removed import COMMANDS, check_removed


@pytest.mark.parametrize("name", COMMANDS)
def test_a_removed_name_is_answered_by_its_replacement(name, capsys):
    """One line, without an import of torch; the verbs that it names exist."""
    words = name.split(" ")
    command = words if not name.startswith("--") else ["fit", *words]
    for argv in (command, [*command, "--help"], [*command[:1], "--config=mine.yaml", *command[1:]]):
        if len(argv) < 3 or not re.fullmatch(r"[\w-]+ \w+", name):  # the second word of a verb comes first
            assert main(argv) == 2
            out, err = capsys.readouterr()
            said = name if name.startswith("--") else f"linvit {name}"
            assert (out, err) == ("", f"linvit: error: {said} was removed. {COMMANDS[name]}\n")
    assert re.fullmatch(r"Use [^\n]{10,200}", COMMANDS[name])
    assert name not in OWN
    for verb in re.findall(r"\blinvit ([a-z-]+)", COMMANDS[name]):
        assert verb in OWN
        assert verb not in COMMANDS


ROWS = {"old": "new", "bench data": "new", "fit --x": "new", "--data.y": "new", "data --z=much": "new"}
FOUND = """
old
old a
bench data --x
fit --x
fit --x=3
fit a --x 3
test --data.y=1
data --z=much
data a --z much
"""
KEPT = """
fit old
bench a data
test --x
fit --xx
data --z=little
x --z much
"""


@pytest.mark.parametrize("command", FOUND.strip().splitlines())
def test_rows_of_all_forms(command, monkeypatch):
    monkeypatch.setattr(removed, "COMMANDS", ROWS)
    with pytest.raises(UserError, match="was removed"):
        check_removed(command.split())


@pytest.mark.parametrize("command", KEPT.splitlines())
def test_what_is_kept(command, monkeypatch):
    monkeypatch.setattr(removed, "COMMANDS", ROWS)
    check_removed(command.split())
