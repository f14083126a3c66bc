"""Runs the checks of a contract; an exception in a check is reported as its failure."""

import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch

from linvit.errors import UserError
from linvit.testing.report import CRASHES, Line, Report, Verdict, crash, places

S = TypeVar("S")

LIBRARIES = (Path(torch.__file__).parent, Path(__file__).parent)
"""Folders whose lines of code say nothing of the cause: one fault may surface in any of them."""
VARIES = re.compile(r"[\d.]+|\b(?:torch\.)?(?:Double|Float|Half|BFloat|double|float|half|bfloat)\w*")


class Check(NamedTuple, Generic[S]):
    """One clause of a contract.

    Attributes:
        name: What the clause is called in reports.
        run: Looks at the subject.
        quick: Whether a quick run has it.
        measures: Whether it only measures, and so cannot fail.
    """

    name: str
    run: Callable[[S], Line]
    quick: bool = True
    measures: bool = False


@dataclass(frozen=True)
class Contract(Generic[S]):
    """The clauses of a contract.

    Attributes:
        first: Clauses without which the others mean nothing: if one fails, no further clause is run. A `UserError` in
            them is the caller's mistake and is raised.
        clauses: The others.
    """

    first: tuple[Check[S], ...]
    clauses: tuple[Check[S], ...]

    def report(self, subject: S, quick: bool) -> Report:
        """Checks all clauses on a subject; a quick run has only the quick ones."""
        start = time.perf_counter()
        lines: list[Line] = []
        for check in self.first:
            lines.append(line(check, subject, first=True))
            if lines[-1].verdict is Verdict.FAIL:
                break
        else:
            lines += run(self.clauses, subject, quick)
        return Report(str(subject), tuple(lines), time.perf_counter() - start)


def run(checks: Iterable[Check[S]], subject: S, quick: bool) -> list[Line]:
    """Runs the checks, in a quick run only the quick ones. An exception is quoted in the first row that it ends."""
    lines: list[Line] = []
    seen: dict[object, str] = {}
    for check in checks:
        if quick and not check.quick:
            continue
        found = line(check, subject)
        if found.error is not None:
            earlier = seen.setdefault(_cause(found.error), check.name)
            if earlier != check.name:
                note = f"{type(found.error).__name__} as in '{earlier}'{places(found.error)}"
                found = found._replace(note=note)
        lines.append(found)
    return lines


def line(check: Check[S], subject: S, *, first: bool = False) -> Line:
    """Runs one check. The caller's random numbers and warning filters stay as they are.

    Args:
        check: The check.
        subject: What it looks at.
        first: Whether a `UserError` is the caller's mistake, and raised.
    """
    start = time.perf_counter()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            found = check.run(subject)
        except CRASHES as error:
            if first and isinstance(error, UserError):
                raise
            found = crash(error)
    return found._replace(name=check.name, seconds=time.perf_counter() - start)


def _cause(error: BaseException) -> object:
    """Returns what is equal for exceptions of one cause: the type, the first words, and the line that raised it."""
    words = VARIES.sub("#", str(error))[:60]
    lines = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(Path(frame.filename).is_relative_to(folder) for folder in LIBRARIES)
    ]
    return type(error), words, lines[-1] if lines else None
