"""What breaks the contract fails on the line that says why, and on no other."""

import pytest

from linvit.testing import Report, Verdict, check_attention
from linvit.testing.attention.numerics import PRECISIONS
from tests.testing import wrong
from tests.testing.helpers import verdicts


@pytest.fixture(scope="module")
def sound() -> Report:
    return check_attention(wrong.Sound, quick=True)


def test_the_sound_one_passes_every_line(sound: Report) -> None:
    assert verdicts(sound, Verdict.PASS) == {line.name for line in sound.lines} - {"position bias"}, f"\n{sound}"


EVERY_FINITE = {f"finite, {precision.name}" for precision in PRECISIONS}
WRONG = {  # class -> the lines that it fails, all of them, and words of the first
    "IgnoresItsBias": ({"position bias"}, "no finite gradient reaches the bias"),
    "BatchCoupled": ({"batch independence"}, "in evaluation"),
    "BatchCoupledInTraining": ({"batch independence"}, "in training"),
    "SquareOnly": ({"grids", "another size"}, "(at 7x9)"),
    "FixedLength": ({"another size"}, "(at 7x9)"),
    "IgnoresPrefix": ({"prefix tokens"}, "the effect of prefix token 0 on patches is 0e+00"),
    "OneWay": ({"prefix tokens"}, "the effect of prefix token 0 on patches is 0e+00"),
    "DeadParameter": ({"gradients"}, "unused (none)"),
    "DetachesKeys": ({"gradients"}, "k (none)"),
    "Random": ({"determinism"}, "two calls in evaluation differ by"),
    "Counts": ({"determinism"}, "changes its state: calls"),
    "ForgetsItsBuffer": ({"copies"}, "a fresh instance with its state dict differs"),
    "NeedsContiguous": ({"memory layout", "attention layer"}, "view size is not compatible"),
    "SwallowsNaN": ({"NaN propagates"}, "a NaN in k disappears"),
    "RaisesAtNaN": ({"NaN propagates"}, "LinAlgError: the algorithm failed to converge (at a NaN in k)"),
    "NonLinearInValues": ({"equivalent matrix"}, "not linear in v, so declare probeable = False"),
    "PerChannel": ({"equivalent matrix"}, "so declare channelwise = True"),
    "MixesChannels": ({"equivalent matrix"}, "channels of v are mixed, so declare probeable = False"),
    "NotPerChannel": ({"equivalent matrix"}, "all channels have one matrix"),
    "WithItsOwnWrongMatrix": ({"equivalent matrix"}, "(2, 2, 196, 195)"),
    "WrongFactors": ({"factors"}, "differ by 1e-03"),
    "FactorsWithoutChannels": ({"factors"}, "is (2, 2, 196, 196), the equivalent matrix (2, 2, 16, 196, 196)"),
    "RankBoundTooSmall": ({"rank"}, "16 (bfloat16), 16 (float16), declared at most 15"),
    "OverflowsInHalf": ({"finite, float16", "finite, autocast float16"}, "not finite, though float64 gives at most"),
    "DividesByTheSpread": (EVERY_FINITE, "output: 32 of 32 not finite, float64 neither at N=1, scale 2^-10"),
    "CoarseInBfloat16": ({"error, bfloat16", "error, autocast bfloat16"}, "goal for outputs 1e-02, at most 1e-01"),
    "Quadratic": ({"growth of work", "growth of time"}, "operations ~ N^2.00"),
    "QuadraticInSecret": ({"growth of work", "growth of time"}, "bytes written ~ N^1.00, operations ~ N^2.00"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_fails_its_line_and_no_other(name: str, sound: Report) -> None:
    lines, words = WRONG[name]
    report = check_attention(getattr(wrong, name), quick=True)
    assert not report.passed
    assert set(report.failures) == lines, f"\n{report}"
    first = next(line.note for line in report.lines if line.name in lines)
    assert words in first
    silent = verdicts(report, Verdict.UNDECLARED) | verdicts(report, Verdict.UNSUPPORTED)
    assert silent <= {"position bias", "factors", "rank"}
    assert [line.name for line in report.lines] == [line.name for line in sound.lines]


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("ReturnsFloat32", "shape and dtype", "float64 in, float32 out"),
        ("WritesToItsInput", "determinism", "it writes to its input v"),
    ],
)
def test_what_spoils_other_lines_too_fails_its_own(name: str, line: str, words: str) -> None:
    report = check_attention(getattr(wrong, name), quick=True)
    assert report[line].verdict is Verdict.FAIL
    assert words in report[line].note


@pytest.mark.parametrize(
    ("name", "line", "words"),
    [
        ("RefusesAnotherLength", "another size", "7x9: built for 196 keys, got 63"),
        ("RefusesPrefix", "prefix tokens", "no place for prefix tokens here"),
    ],
)
def test_what_refuses_with_a_user_error_declares(name: str, line: str, words: str) -> None:
    report = check_attention(getattr(wrong, name), quick=True)
    assert report.passed, f"\n{report}"
    assert verdicts(report, Verdict.UNSUPPORTED) == {line, "position bias"}
    assert words in report[line].note


def test_a_matrix_of_its_own_is_taken() -> None:
    report = check_attention(wrong.WithItsOwnMatrix, quick=True)
    assert report.passed, f"\n{report}"
    assert "its own, (2, 2, 196, 196)" in report["equivalent matrix"].note


def test_a_local_class_has_no_path_for_the_host() -> None:
    class Local(wrong.Sound):
        pass

    assert check_attention(Local, quick=True)["attention layer"].verdict is Verdict.UNSUPPORTED


@pytest.mark.slow
def test_a_graph_break_fails_compilation_and_export() -> None:
    report = check_attention(wrong.BreaksTheGraph)
    assert set(report.failures) == {"torch.compile", "torch.export"}, f"\n{report}"
