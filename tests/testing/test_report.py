"""The table."""

import pytest

from linvit import UserError
from linvit.testing import Line, Report, Verdict
from linvit.testing.report import Check, at, crash, passed, refusable

LINES = (
    Line("grids", Verdict.PASS, "7x9", 0.31),
    Line("rank", Verdict.FAIL, "measured 17, declared at most 16", 12),
    Line("factors", Verdict.UNDECLARED, "factors(q, k, grid) gives None"),
    Line("another size", Verdict.UNSUPPORTED, ""),
)


def test_table():
    report = Report("mine", LINES, 12.3)
    assert str(report).splitlines() == [
        "mine: FAILED (1 pass, 1 FAIL, 1 not declared, 1 not supported) in 12 s",
        "  grids         pass             0.3 s  7x9",
        "  rank          FAIL            12.0 s  measured 17, declared at most 16",
        "  factors       not declared     0.0 s  factors(q, k, grid) gives None",
        "  another size  not supported    0.0 s",
    ]
    assert not report.passed
    assert report.failures == ["rank"]
    assert report["rank"] == LINES[1]


def test_only_a_failure_counts():
    report = Report("mine", LINES[:1] + LINES[2:], 0.2)
    assert report.passed
    assert str(report).startswith("mine: passed (1 pass, 1 not declared, 1 not supported) in 0 s\n")


def test_a_crash_says_what_and_where():
    try:
        with at("7x9"):
            raise ValueError("first\n  second")
    except ValueError as error:
        finding = crash(error)
    assert finding[1:3] == (Verdict.FAIL, "ValueError: first second (at 7x9)")


def test_advice_comes_last() -> None:
    def run(_: object) -> Line:
        with at("7x9"), at("scale 2"):
            raise ValueError("first")

    clause = Check("a", run, advice="take another")
    assert clause.line(None).note == "ValueError: first (at scale 2, 7x9); take another"
    assert clause._replace(run=lambda _: passed("all is well")).line(None).note == "all is well"


def test_an_exit_is_a_crash_with_its_place() -> None:
    with pytest.raises(SystemExit) as caught, at("7x9"):
        raise SystemExit(3)
    assert crash(caught.value)[1:3] == (Verdict.FAIL, "SystemExit: 3 (at 7x9)")


def test_a_refusal_is_a_declaration_and_a_crash_is_not() -> None:
    @refusable
    def check(error: Exception) -> Line:
        raise error

    assert check(UserError("at most 1000 tokens"))[1:3] == (Verdict.UNSUPPORTED, "at most 1000 tokens")
    with pytest.raises(ValueError, match="no reason"):
        check(ValueError("no reason"))


def test_a_crash_without_words_or_with_too_many():
    assert crash(KeyError()).note == "KeyError: (no message)"
    assert len(crash(ValueError("long " * 100)).note) < 220
