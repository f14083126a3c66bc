"""`python -m tests.hostile.run`: every hostile file through every door, and how many of each went wrong.

python -m tests.hostile.run             all of it, about a quarter of an hour on one core
python -m tests.hostile.run --quick     every third file of groups of many
python -m tests.hostile.run --only data
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

import linvit.cli.check
import linvit.cli.data
import linvit.cli.import_weights
import linvit.cli.list
import linvit.cli.training.command_line  # noqa: F401 (forks need not import them)
from tests.hostile import commands, data, runs, weights
from tests.hostile.forks import Outcome, attempt
from tests.web import serving

FEW = 8  # files of a group of which none is left out
WRONG = ("executed", "requests", "hang", "traceback", "memory", "escapes")


class Case(NamedTuple):
    """A file and a door."""

    group: str
    file: Path
    door: str
    call: Callable[[Path, str], object]


def prepare(root: Path, mark: Path, address: str) -> dict[str, list[Path]]:
    """Writes all hostile files, in a fork: threads of pyarrow and torch do not survive the forks that follow."""
    groups: dict[str, Callable[[Path], Iterator[Path]]] = {
        "weights": lambda folder: weights.write(folder, mark),
        "data": lambda folder: (
            path for part in (data.folders(folder, mark), data.tables(folder, address)) for path in part
        ),
        "annotations": data.annotations,
        "configurations": lambda folder: commands.configurations(folder, mark),
        "plug-ins": commands.plugins,
        "runs": lambda folder: runs.write(folder, mark),
    }
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for group, write in groups.items():
                (root / group).mkdir()
                names = [str(path) for path in write(root / group)]
                (root / f"{group}.txt").write_text("\n".join(names), encoding="utf-8")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return {group: [Path(name) for name in (root / f"{group}.txt").read_text().split("\n")] for group in groups}


def cases(files: dict[str, list[Path]]) -> Iterator[Case]:
    """Every file with every door of its group."""
    doors = {
        "weights": weights.PYTHON | weights.COMMANDS,
        "data": data.DOORS,
        "annotations": data.ANNOTATION_DOORS,
        "configurations": commands.CONFIG_DOORS,
        "plug-ins": commands.PLUGIN_DOORS,
        "runs": runs.DOORS,
    }
    for group, paths in files.items():
        for path in paths:
            for door, call in doors[group].items():
                yield Case(group, path, door, call)


def run(only: str | None = None, every: int = 1, verbose: bool = False) -> list[tuple[Case, Outcome]]:
    """Tries all cases, or every n-th file of a group."""
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory(prefix="linvit-hostile-", ignore_cleanup_errors=True) as name:
        root, mark = Path(name), Path(name) / "mark"
        programs = root / "bin"  # what images must not call
        programs.mkdir()
        for program in ("gs", "gswin64c"):
            (programs / program).write_text(f"#!/bin/sh\ntouch {mark}\n", encoding="utf-8")
            (programs / program).chmod(0o755)
        os.environ["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root / "hub")}
        sys.path.append(str(root / "weights"))  # where a module lies that checkpoints name
        (root / "served").symlink_to(root / "weights")
        with serving(root / "served") as (address, asked):
            files = prepare(root, mark, address)
            chosen = {
                group: paths[:: every if len(paths) > FEW else 1]
                for group, paths in files.items()
                if only in (None, group)
            }
            for case in cases(chosen):
                outcome = attempt(lambda c=case: c.call(c.file, address), mark, asked, f"/{case.file.name}")
                found.append((case, outcome))
                if outcome.wrong or verbose:
                    print(f"{', '.join(outcome.wrong) or outcome.end}: {case.door}  {case.file.name!a}", flush=True)
                    print(ascii(outcome.output[-1500:]).replace("\\n", "\n    ") if outcome.wrong else "", flush=True)
    return found


def table(found: list[tuple[Case, Outcome]]) -> str:
    """Counts by group and door."""
    lines = [f"{'door':<34}{'files':>6}" + "".join(f"{name:>11}" for name in WRONG) + f"{'most s':>8}{'most GB':>9}"]
    for group, door in dict.fromkeys((case.group, case.door) for case, _ in found):
        of = [outcome for case, outcome in found if (case.group, case.door) == (group, door)]
        counts = [sum(name in outcome.wrong for outcome in of) for name in WRONG]
        most = f"{max(o.seconds for o in of):>8.1f}{max(o.bytes for o in of) / 1e9:>9.2f}"
        lines.append(f"{door:<34}{len(of):>6}" + "".join(f"{count:>11}" for count in counts) + most)
    totals = [sum(name in outcome.wrong for _, outcome in found) for name in WRONG]
    lines.append(f"{'all':<34}{len(found):>6}" + "".join(f"{count:>11}" for count in totals))
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["weights", "data", "annotations", "configurations", "plug-ins", "runs"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    results = run(args.only, 3 if args.quick else 1, args.verbose)
    print(table(results))
    sys.exit(any(outcome.wrong for _, outcome in results))
