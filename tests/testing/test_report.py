"""The table."""

from linvit import UserError
from linvit.testing import Line, Report, Verdict
from linvit.testing.report import Check, at, failed

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


def ended(end: BaseException, refusable: bool = False, advice: str = "") -> Line:
    """The row of a clause that ends by an exception."""

    def run(_: object) -> str:
        with at("7x9"), at("scale 2"):
            raise end

    return Check("a", run, refusable=refusable, advice=advice).line(None)


def test_a_crash_says_what_and_where():
    line = ended(ValueError("first\n  second"))
    assert line[:3] == ("a", Verdict.FAIL, "ValueError: first second (at scale 2, 7x9)")
    assert isinstance(line.error, ValueError)
    assert ended(SystemExit(3)).note == "SystemExit: 3 (at scale 2, 7x9)"


def test_a_crash_without_words_or_with_too_many():
    assert ended(KeyError()).note == "KeyError: (no message) (at scale 2, 7x9)"
    assert len(ended(ValueError("long " * 100)).note) < 240


def test_advice_comes_last() -> None:
    assert ended(ValueError("first"), advice="take another").note.endswith("first (at scale 2, 7x9); take another")
    assert ended(failed("too few"), advice="take another").note == "too few; take another"
    assert Check("a", lambda _: "all is well", advice="take another").line(None)[1:3] == (Verdict.PASS, "all is well")


def test_a_refusal_is_a_declaration_where_a_clause_allows_it() -> None:
    refusal = UserError("at most 1000 tokens")
    assert ended(refusal, refusable=True)[1:3] == (Verdict.UNSUPPORTED, "at most 1000 tokens (at scale 2, 7x9)")
    assert ended(UserError("at most 1000 tokens")).verdict is Verdict.FAIL
    assert ended(ValueError("no reason"), refusable=True).verdict is Verdict.FAIL
