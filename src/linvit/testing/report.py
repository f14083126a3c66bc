"""What the checks found: a verdict and the offending numbers per line."""

import contextlib
import functools
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeVar

from linvit.errors import UserError

S = TypeVar("S")


CRASHES = (Exception, SystemExit)
"""What a subject may end a check with: a `sys.exit` in it is its failure, the user's Ctrl-C is not."""


class Verdict(Enum):
    """How one check ended. Only `FAIL` counts."""

    PASS = "pass"
    FAIL = "FAIL"
    UNDECLARED = "not declared"
    """The subject does not tell (factors, a complexity), so there was nothing to hold it to."""
    UNSUPPORTED = "not supported"
    """The subject says that it cannot, by a declaration or a `UserError`."""


class Finding(NamedTuple):
    """What one check returns.

    Attributes:
        verdict: How it ended.
        note: The numbers behind the verdict.
    """

    verdict: Verdict
    note: str


class Line(NamedTuple):
    """One row of a report.

    Attributes:
        name: The check's name.
        verdict: How it ended.
        note: The numbers behind the verdict.
        seconds: Time that it took.
    """

    name: str
    verdict: Verdict
    note: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """All that was checked of one subject; `str(report)` is the table.

    Attributes:
        subject: What was checked: a name, a spec or a class.
        lines: One row per check, in order.
        seconds: Time that it took.
    """

    subject: str
    lines: tuple[Line, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no line failed."""
        return not self.failures

    @property
    def failures(self) -> list[str]:
        """Names of the checks that failed."""
        return [line.name for line in self.lines if line.verdict is Verdict.FAIL]

    def __getitem__(self, name: str) -> Line:
        """The row of a check."""
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


def passed(note: str = "") -> Finding:
    """The subject keeps the contract."""
    return Finding(Verdict.PASS, note)


def failed(note: str) -> Finding:
    """It does not; the note has the offending numbers."""
    return Finding(Verdict.FAIL, note)


def not_declared(note: str) -> Finding:
    """There is no declaration to hold it to."""
    return Finding(Verdict.UNDECLARED, note)


def not_supported(note: str) -> Finding:
    """It declares that it cannot."""
    return Finding(Verdict.UNSUPPORTED, note)


def refusable(check: Callable[[S], Finding]) -> Callable[[S], Finding]:
    """A check of which the subject may say, by a `UserError`, that it cannot."""

    @functools.wraps(check)
    def run(subject: S) -> Finding:
        try:
            return check(subject)
        except UserError as error:
            return not_supported(place(error))

    return run


@contextlib.contextmanager
def at(place: str) -> Iterator[None]:
    """Notes on an exception where it happened, such as "7x9" or "N=3136, scale 2^6"."""
    try:
        yield
    except CRASHES as error:
        error.add_note(place)
        raise


def crash(error: BaseException) -> Finding:
    """A check that an exception ended has failed: the error's message and where it happened."""
    return failed(f"{type(error).__name__}: {place(error)}")


def place(error: BaseException) -> str:
    """The beginning of an error's message, and the place that `at` noted."""
    message = textwrap.shorten(str(error), 200, placeholder=" ...") or "(no message)"
    notes: list[str] = getattr(error, "__notes__", [])
    return f"{message} (at {', '.join(notes)})" if notes else message
