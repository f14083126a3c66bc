"""What exits, remembers, refuses or couples fails the clause that it concerns, with the cause."""

import re

import pytest

from linvit.testing import Verdict, check_attention
from linvit.testing.attention.inputs import AttentionSubject
from linvit.testing.attention.precision import PRECISIONS, numerics
from linvit.testing.report import ClauseError
from tests.testing import wrong_behaviour
from tests.testing.helpers import attention_lines

WRONG = {  # class -> the clauses that it breaks, all of them, and words of the last
    "ExitsAtConstruction": ({"constructor"}, "SystemExit: 0"),
    "ExitsInForward": ({"declarations"}, "SystemExit: no licence (at forward)"),
    "ExitsAtPrefix": ({"prefix tokens", "spatial reduction"}, "SystemExit: (no message) (at 6x8 reduced"),
    "CountsItsTraining": ({"copies"}, "a fresh instance with its state dict differs by"),
    "CentresTheBatch": (
        {"batch independence", "NaN propagates", "equivalent matrix"},
        "a sample's output depends on the others of its batch, so fix batch independence first",
    ),
    "DropsAndCouplesInTraining": ({"batch independence"}, "in training, at one seed among others (at most 1e-09)"),
    "RefusesLargeAndIsCoarse": ({"numerics, bfloat16", "numerics, autocast bfloat16"}, "at most 1e-01"),
}
SIZED = {"growth of work"}
REFUSED = "not N=3136: at most 1000 tokens; got 3136; "
THIN = {"grids", "another size", *(f"numerics, {precision.name}" for precision in PRECISIONS)}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_fails_its_clauses(name: str) -> None:
    names, words = WRONG[name]
    lines = attention_lines(getattr(wrong_behaviour, name), names)
    assert all(line.verdict is Verdict.FAIL for line in lines), lines
    assert words in lines[-1].note


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_fails_no_other_clause(name: str) -> None:
    report = check_attention(getattr(wrong_behaviour, name), quick=True)
    assert set(report.failures) == WRONG[name][0], f"\n{report}"


def test_noise_in_evaluation_fails_determinism_and_not_the_declarations() -> None:
    determinism, matrix = attention_lines(wrong_behaviour.DropsInEvaluation, {"determinism", "equivalent matrix"})
    assert determinism.verdict is Verdict.FAIL
    assert "two calls in evaluation differ, so fix determinism first" in matrix.note


def test_dropout_in_training_passes() -> None:
    (line,) = attention_lines(wrong_behaviour.DropsInTraining, {"batch independence"})
    assert line.verdict is Verdict.PASS
    assert line.note.endswith("in training, at one seed among others")


@pytest.mark.parametrize(
    ("name", "names", "words"),
    [
        ("RefusesThin", THIN, "a grid has at least two rows and columns"),
        ("RefusesLargeCalls", SIZED, "at most 1000 tokens; got 3136"),
        ("RefusesToBeLarge", SIZED, "at most 1000 tokens; got 3136"),
    ],
)
def test_a_refused_size_is_not_supported_in_every_clause(name: str, names: set[str], words: str) -> None:
    for line in attention_lines(getattr(wrong_behaviour, name), names):
        assert line.verdict is Verdict.UNSUPPORTED, line
        assert words in line.note


@pytest.mark.parametrize("name", ["RefusesLargeCalls", "RefusesToBeLarge"])
def test_a_refused_size_leaves_the_numbers_of_the_others(name: str) -> None:
    subject = AttentionSubject(getattr(wrong_behaviour, name), 32, 2, quick=False)
    with pytest.raises(ClauseError, match=f"^{re.escape(REFUSED)}.*N=196") as caught:
        numerics(PRECISIONS[0])(subject)
    assert caught.value.verdict is Verdict.UNSUPPORTED
