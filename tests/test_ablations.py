"""The ablations of papers under configs/ablations: their comments, and that their commands make runs that start."""

import shlex

import pytest
import yaml

from linvit.cli.compare import grid_of, parse
from linvit.cli.compare.run import resolve
from linvit.experiments.compare.grid import Sweep
from linvit.runs.configs import find
from tests.test_configs import GRIDS, ROOT, heading

FILES = sorted(name for name in GRIDS if "/on_digits/" not in name)


def commands(name):
    """The command on ImageNet, with the digits in its place, and the command on the digits."""
    fields = heading(name)
    return fields["Command"].replace("--data.source=PATH", "--data.source=digits"), fields["Digits"]


@pytest.mark.parametrize("name", FILES)
def test_it_says_paper_commands_and_what_is_published(name):
    fields = heading(name)
    assert fields.keys() >= {"Paper", "Command", "Digits", "Expected"}
    assert fields["Expected"].startswith("not yet run")
    grid = Sweep.read(yaml.safe_load((ROOT / name).read_text(encoding="utf-8")), name).grid()
    assert grid.published or "no scores" in fields["Expected"]
    assert " and " not in grid.published.get("source", ""), "one source for a column"
    for command in commands(name):
        program, verb, given, *_ = shlex.split(command)
        assert (program, verb) == ("linvit", "compare")
        assert find(given) == ROOT / name
        made, title = grid_of(*parse(shlex.split(command)[2:]))
        assert made.grid().variants == grid.variants
        assert title == given.removeprefix("ablations/")
        assert all(find(config) for config in made.grid().config)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_all_of_its_cells_can_be_run(name):
    for command in commands(name):
        grid = grid_of(*parse(shlex.split(command)[2:]))[0].grid()
        assert list(resolve(grid)) == list(grid.variants)
