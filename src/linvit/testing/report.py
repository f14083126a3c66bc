"""Clauses of a contract and the results of checking them: a verdict and numbers for each."""

import contextlib
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch

from linvit.errors import UserError
from linvit.testing.numbers import EXACT

CRASHES = (Exception, SystemExit)
"""Exceptions that count as a failure of the subject: `sys.exit`, but not the user's Ctrl-C."""


class Verdict(Enum):
    """Result of a check. Only `FAIL` counts as a failure."""

    PASS = "pass"
    FAIL = "FAIL"
    UNDECLARED = "not declared"
    """The subject declares nothing here (no factors, no rank bound), so there is nothing to compare."""
    UNSUPPORTED = "not supported"
    """The subject reports that it cannot do this, by a declaration or a `UserError`."""


class Line(NamedTuple):
    """Result of one check, a row of a report."""

    name: str
    verdict: Verdict
    note: str  # the numbers behind the verdict
    seconds: float = 0.0
    error: BaseException | None = None  # the exception that ended the check, if any


@dataclass(frozen=True)
class Report:
    """Results of all checks of one subject (a name, a spec or a class), in order; `str(report)` is a table."""

    subject: str
    lines: tuple[Line, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Returns True if no check failed."""
        return not self.failures

    @property
    def failures(self) -> list[str]:
        """Returns the names of the checks that failed."""
        return [line.name for line in self.lines if line.verdict is Verdict.FAIL]

    def __getitem__(self, name: str) -> Line:
        """Returns the row of a check."""
        return {line.name: line for line in self.lines}[name]

    def __str__(self) -> str:
        found = [line.verdict for line in self.lines]
        counts = ", ".join(f"{found.count(verdict)} {verdict.value}" for verdict in Verdict if verdict in found)
        title = f"{self.subject}: {'passed' if self.passed else 'FAILED'} ({counts}) in {self.seconds:.0f} s"
        width = max(len(line.name) for line in self.lines)
        rows = (
            f"  {line.name:<{width}}  {line.verdict.value:<13}  {line.seconds:5.1f} s  {line.note}".rstrip()
            for line in self.lines
        )
        return "\n".join([title, *rows])


class ClauseError(Exception):
    """Ends a clause without a pass; the message has the offending numbers, or the reason."""

    def __init__(self, verdict: Verdict, note: str) -> None:
        super().__init__(note)
        self.verdict = verdict


class Check(NamedTuple):
    """Clause of a contract."""

    name: str
    run: Callable[[Any], str]  # returns the numbers behind a pass, and raises a `ClauseError` otherwise
    quick: bool = True  # True if a quick run includes it
    advice: str = ""  # advice for the author of a subject that breaks it
    refusable: bool = False  # True if the subject may reject it by a `UserError`

    def line(self, subject: Any, *, first: bool = False) -> Line:
        """Checks the subject without changing random states; a `UserError` of one of the `first` clauses is raised."""
        start = time.perf_counter()
        verdict, cause = Verdict.PASS, None
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            try:
                note = self.run(subject)
            except ClauseError as end:
                verdict, note = end.verdict, str(end)
            except CRASHES as error:
                if isinstance(error, UserError) and first:
                    raise
                if isinstance(error, UserError) and self.refusable:
                    verdict, note = Verdict.UNSUPPORTED, message(error)
                else:
                    verdict, note, cause = Verdict.FAIL, f"{type(error).__name__}: {message(error)}", error
        if self.advice and verdict is Verdict.FAIL:
            note += f"; {self.advice}"
        return Line(self.name, verdict, note, time.perf_counter() - start, cause)


class Contract(NamedTuple):
    """Clauses of a contract. If one of the first fails, no other is run: their results would be meaningless."""

    first: tuple[Check, ...]
    clauses: tuple[Check, ...]

    def of(self, quick: bool) -> list[Check]:
        """Returns the clauses of a quick run, or all of them, without the first ones."""
        return [check for check in self.clauses if check.quick or not quick]

    def obstacle(self, subject: Any) -> Line | None:
        """Returns the row of the first clause that fails, if any."""
        lines = (check.line(subject, first=True) for check in self.first)
        return next((line for line in lines if line.verdict is Verdict.FAIL), None)

    def report(self, subject: Any, quick: bool) -> Report:
        """Checks the clauses on a subject; a quick run has only the quick ones."""
        start = time.perf_counter()
        lines: list[Line] = []
        for check in self.first:
            lines.append(check.line(subject, first=True))
            if lines[-1].verdict is Verdict.FAIL:
                break
        else:
            lines += [check.line(subject) for check in self.of(quick)]
        return Report(str(subject), tuple(lines), time.perf_counter() - start)


failed = partial(ClauseError, Verdict.FAIL)
not_declared = partial(ClauseError, Verdict.UNDECLARED)
not_supported = partial(ClauseError, Verdict.UNSUPPORTED)
"""Exception that a clause raises, with a note."""


def require(holds: object, note: str) -> None:
    """Fails a clause unless a condition holds."""
    if not holds:
        raise failed(note)


def judged(error: float, note: str, limit: float = EXACT) -> str:
    """Returns the note on an error that is within a limit; fails the clause otherwise, also for NaN."""
    require(error <= limit, f"{note} (at most {limit:.0e})")
    return note


@contextlib.contextmanager
def at(note: str) -> Iterator[None]:
    """Adds to an exception where it occurred, such as "7x9" or "N=3136, scale 2^6"."""
    try:
        yield
    except CRASHES as error:
        error.add_note(note)
        raise


def message(error: BaseException) -> str:
    """Returns the beginning of an error's message, and the notes that `at` added, such as " (at 7x9)"."""
    notes = getattr(error, "__notes__", [])
    text = textwrap.shorten(str(error), 200, placeholder=" ...") or "(no message)"
    return text + (f" (at {', '.join(notes)})" if notes else "")
