"""Runs the lines of a contract, whatever the subject does in them."""

import time
import warnings
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

import torch

from linvit.testing.report import CRASHES, Finding, Line, crash

S = TypeVar("S")


class Check(NamedTuple, Generic[S]):
    """One line of a contract.

    Attributes:
        name: What the line is called in reports.
        run: Looks at the subject.
        quick: Whether a quick run has it.
    """

    name: str
    run: Callable[[S], Finding]
    quick: bool = True


def run(checks: Iterable[Check[S]], subject: S, quick: bool) -> list[Line]:
    """A row per check; a quick run has only the quick ones."""
    return [_line(check, subject) for check in checks if check.quick or not quick]


def _line(check: Check[S], subject: S) -> Line:
    """One check's row, whatever happens in it. The caller's random numbers and warning filters stay as they are."""
    start = time.perf_counter()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            finding = check.run(subject)
        except CRASHES as error:
            finding = crash(error)
    return Line(check.name, *finding, seconds=time.perf_counter() - start)
