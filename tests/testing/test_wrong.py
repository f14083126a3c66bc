"""What breaks the contract fails on the clause that says why; the slow test shows that it fails on no other."""

import pytest

from linvit.testing import Report, Verdict, check_attention
from linvit.testing.attention.precision import PRECISIONS
from tests.testing import wrong
from tests.testing.helpers import attention_lines, verdicts


@pytest.fixture(scope="module")
def sound() -> Report:
    return check_attention(wrong.Sound, quick=True)


def test_the_sound_one_passes_every_clause(sound: Report) -> None:
    assert verdicts(sound, Verdict.UNSUPPORTED) == {"position bias", "masked keys"}, f"\n{sound}"
    assert verdicts(sound, Verdict.UNDECLARED) == {"matrix parts", "channel matrix", "order of tokens"}
    assert len(verdicts(sound, Verdict.PASS)) == len(sound.lines) - 5, f"\n{sound}"


EVERY_PRECISION = {f"numerics, {precision.name}" for precision in PRECISIONS}
HALF = EVERY_PRECISION - {"numerics, float32"}
WRONG = {  # class -> the clauses that it breaks, all of them, and words of the first
    "IgnoresItsBias": ({"position bias", "masked keys"}, "no finite gradient reaches the bias"),
    "SeesPlaces": ({"order of tokens"}, "(at most 1e-09); declare equivariant = False"),
    "HidesItsBias": ({"position bias"}, "forward takes bias, which no host hands to it while takes_bias is False"),
    "CountsMaskedKeys": ({"masked keys"}, "the tokens that are left differ by"),
    "BatchCoupled": ({"batch independence", "NaN propagates"}, "in evaluation"),
    "BatchCoupledInTraining": ({"batch independence"}, "in training"),
    "SquareOnly": (
        {"grids", "another size", "prefix tokens", "spatial reduction"},
        "(at 7x9); it works at 14x14, so take the size from grid and not from the number of tokens",
    ),
    "FixedLength": (
        {"another size", "resizes its tables"},
        "(at 7x9); take all sizes from the grid of the call, or refuse it",
    ),
    "RefusesWithoutASize": (
        {"another size", "resizes its tables"},
        "7x9 is refused in words that do not name it: not this grid",
    ),
    "RemembersTheLargestGrid": ({"another size"}, "earlier calls change the output by 7e-01 (at most 1e-09) at 7x9"),
    "KeepsItsTable": ({"resizes its tables"}, "so weights of another image size do not fit: override resize_tables"),
    "ResizesItsTableOtherwise": ({"resizes its tables"}, "resize in resize_tables as in forward"),
    "IgnoresPrefix": ({"prefix tokens"}, "the effect of prefix token 0 on patches is 0e+00"),
    "OneWay": ({"prefix tokens"}, "the effect of prefix token 0 on patches is 0e+00"),
    "BlindPatch": ({"prefix tokens"}, "the effect of prefix token 0 on patches is 0e+00"),
    "DeadParameter": ({"gradients"}, "unused (none)"),
    "DetachesKeys": ({"gradients"}, "k (none)"),
    "Random": ({"determinism"}, "two calls in evaluation differ by"),
    "Counts": ({"determinism"}, "changes its state: calls"),
    "KeepsItsShape": ({"determinism"}, "a call in evaluation leaves attributes behind: last"),
    "ForgetsItsBuffer": ({"copies"}, "a fresh instance with its state dict differs"),
    "KeepsALambda": ({"copies"}, "(at a pickle)"),
    "NeedsContiguous": ({"attention layer"}, "view size is not compatible"),
    "SwallowsNaN": ({"NaN propagates"}, "a NaN in k disappears"),
    "RaisesAtNaN": ({"NaN propagates"}, "LinAlgError: the algorithm failed to converge (at a NaN in k)"),
    "SpreadsNaN": ({"NaN propagates"}, "a NaN in k of one sample changes another sample"),
    "NonLinearInValues": ({"equivalent matrix"}, "not linear in v, so declare linear_in_values = False"),
    "PerChannel": ({"equivalent matrix"}, "so declare channelwise = True"),
    "MixesChannels": ({"equivalent matrix"}, "channels of v are mixed, so declare linear_in_values = False"),
    "NotPerChannel": ({"equivalent matrix"}, "all channels have one matrix"),
    "WithItsOwnWrongMatrix": ({"equivalent matrix"}, "(2, 2, 48, 47)"),
    "WithAnotherMatrix": ({"equivalent matrix"}, "attention_matrix times v differs from the output by 1e-03"),
    "WrongFactors": ({"factors"}, "left @ right.mT differs from the equivalent matrix by 1e-03 at 6x8"),
    "FactorsWithoutChannels": ({"factors"}, "is (2, 2, 48, 48), the equivalent matrix (2, 2, 16, 48, 48)"),
    "PartsDoNotAddUp": ({"matrix parts"}, "the sum of the parts differs from the equivalent matrix by 5e-01 at 6x8"),
    "RankBoundTooSmall": ({"rank"}, "measured 16, declared at most 15 at 6x8"),
    "RankBoundTooLarge": ({"rank"}, "the bound 1000 is above the rank of any matrix at 6x8"),
    "OverflowsInHalf": (
        {"numerics, float16", "numerics, autocast float16"},
        "run the delicate part in float32: decorate forward, or a method (self, q, k, v), with @linvit.full_precision",
    ),
    "DividesByTheSpread": (EVERY_PRECISION, "output: 32 of 32 not finite, nor in float64: look for a division by 0"),
    "CoarseInBfloat16": ({"numerics, bfloat16", "numerics, autocast bfloat16"}, "output differs from float64 by"),
    "CoarseGradientInHalf": (HALF, "gradient of k differs from float64 by"),
    "Quadratic": ({"growth of work"}, "operations ~ N^2.00"),
    "QuadraticInAFusedKernel": (
        {"growth of work"},
        "bytes kept for backward ~ N^1.00, operations ~ N^2.00",
    ),
    "DeclaredSlowerThanItIs": ({"growth of work"}, "that is linear, so declare complexity = 'O(N)'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_fails_its_clauses(name: str) -> None:
    names, words = WRONG[name]
    lines = attention_lines(getattr(wrong, name), names)
    assert all(line.verdict is Verdict.FAIL for line in lines), lines
    assert words in lines[0].note


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_fails_no_other_clause(name: str, sound: Report) -> None:
    report = check_attention(getattr(wrong, name), quick=True)
    assert set(report.failures) == WRONG[name][0], f"\n{report}"
    undone = verdicts(report, Verdict.UNDECLARED) | verdicts(report, Verdict.UNSUPPORTED)
    host = {"position bias", "masked keys", "order of tokens"}
    assert undone <= host | {"equivalent matrix", "channel matrix", "factors", "matrix parts", "rank"}
    assert [line.name for line in report.lines] == [line.name for line in sound.lines]


def test_a_table_that_is_resized_passes() -> None:
    (line,) = attention_lines(wrong.ResizesItsTable, {"resizes its tables"})
    assert line.verdict is Verdict.PASS
    assert line.note.startswith("gain from 18x18 to 16x17, where the output is the same to ")


@pytest.mark.parametrize(
    ("name", "clause", "words"),
    [
        ("ReturnsFloat32", "shape and dtype", "float64 in, float32 out"),
        ("WritesToItsInput", "determinism", "it writes to its input v"),
    ],
)
def test_what_spoils_other_clauses_too_fails_its_own(name: str, clause: str, words: str) -> None:
    (line,) = attention_lines(getattr(wrong, name), {clause})
    assert line.verdict is Verdict.FAIL
    assert words in line.note


@pytest.mark.parametrize(
    ("name", "clause", "words"),
    [
        ("RefusesAnotherLength", "another size", "7x9: built for 196 keys, got a grid of 7x9"),
        ("RefusesPrefix", "prefix tokens", "no place for prefix tokens here"),
    ],
)
def test_what_refuses_with_a_user_error_declares(name: str, clause: str, words: str) -> None:
    (line,) = attention_lines(getattr(wrong, name), {clause})
    assert line.verdict is Verdict.UNSUPPORTED
    assert words in line.note


def test_a_matrix_of_its_own_is_taken() -> None:
    (line,) = attention_lines(wrong.WithItsOwnMatrix, {"equivalent matrix"})
    assert line.verdict is Verdict.PASS


def test_a_matrix_that_says_how_tokens_are_mixed_and_no_more_is_taken() -> None:
    """Values are convolved before, so the matrix times the values is not the output."""
    (line,) = attention_lines("vssd", {"equivalent matrix"})
    assert line.verdict is Verdict.PASS


def test_a_local_class_has_no_path_for_the_host() -> None:
    class Local(wrong.Sound):
        pass

    layer, copies = attention_lines(Local, {"attention layer", "copies"})
    assert layer.verdict is Verdict.UNSUPPORTED
    assert copies.verdict is Verdict.PASS  # without a pickle, which finds classes by their path


@pytest.mark.slow
def test_a_graph_break_fails_compilation_and_export() -> None:
    report = check_attention(wrong.BreaksTheGraph)
    assert set(report.failures) == {"torch.compile", "torch.export", "onnx"}, f"\n{report}"
