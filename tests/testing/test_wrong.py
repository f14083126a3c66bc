"""What breaks the contract of attention fails the clause that concerns it, which says what is wrong."""

import pytest

from linvit.testing import Verdict, check_attention
from linvit.testing.attention.check import CONTRACT
from linvit.testing.attention.inputs import AttentionSubject
from linvit.testing.attention.precision import PRECISIONS, numerics
from linvit.testing.report import ClauseError
from tests.testing import wrong
from tests.testing.helpers import assert_fail, attention_lines, clauses, verdicts

NUMERICS = {f"numerics, {precision.name}" for precision in PRECISIONS}
FLOAT16, BFLOAT16 = ({f"numerics, {kind}{name}" for kind in ("", "autocast ")} for name in ("float16", "bfloat16"))
UNREADABLE = {
    "FractionalWidth": "out_dim must be a whole number at least 1; got 48.0",
    "OneFactor": "factors(q, k, grid) must be two tensors, left and right, or None; got a Tensor",
    "ReturnsItsState": "what forward returns must be one tensor (B, h, N, out_dim / h); got a tuple",
    "ExitsInForward": "SystemExit: no licence (at forward)",
}
WRONG = {  # class -> clauses that it breaks, and words of the first
    "ReturnsFloat32": ({"shape and dtype"}, "float64 in, float32 out"),
    "SquareOnly": ({"grids", "another size"}, "(at 7x9); it works at 14x14, so take the size from grid"),
    "FixedLength": ({"another size", "resizes its tables"}, "(at 7x9); take all sizes from the grid of the call"),
    "RefusesWithoutASize": ({"another size"}, "7x9 is rejected by a message that does not contain it: not this grid"),
    "RemembersTheLargestGrid": ({"another size"}, "earlier calls change the output by 7e-01"),
    "KeepsItsTable": ({"resizes its tables"}, "gain of 18x18 is (1, 324, 1) for 16x17 and should be (1, 272, 1)"),
    "IgnoresPrefix": ({"prefix tokens"}, "the effect of prefix token 0 on patches is 0e+00"),
    "NeedsAllKeys": ({"spatial reduction"}, "declare same_grid=True"),
    "NeedsContiguous": ({"attention layer"}, "view size is not compatible"),
    "IgnoresItsBias": ({"position bias", "masked keys"}, "no finite gradient reaches the bias"),
    "HidesItsBias": ({"position bias"}, "no host hands to it while accepts_bias is False"),
    "CountsMaskedKeys": ({"masked keys"}, "the tokens that are left differ by"),
    "SumsOverAllImages": ({"packed images"}, "from that of each size alone (at most 1e-12)"),
    "BatchCoupled": ({"batch independence"}, "in evaluation"),
    "BatchCoupledInTraining": ({"batch independence"}, "in training"),
    "DropsAndCouplesInTraining": ({"batch independence"}, "in training, at one seed among others"),
    "DeadParameter": ({"gradients"}, "unused (none)"),
    "Random": ({"determinism"}, "two calls in evaluation differ by"),
    "Counts": ({"determinism"}, "changes its state: calls"),
    "WritesToItsInput": ({"determinism"}, "it writes to its input v"),
    "ForgetsItsBuffer": ({"copies"}, "a fresh instance with its state dict differs"),
    "KeepsALambda": ({"copies"}, "(at a pickle)"),
    "SeesPlaces": ({"order of tokens"}, "declare equivariant=False"),
    "NonLinearInValues": ({"equivalent matrix"}, "declare linear_in_values=False"),
    "PerChannel": ({"equivalent matrix"}, "declare channelwise=True"),
    "MixesChannels": ({"equivalent matrix"}, "channels of v are mixed"),
    "WithAnotherMatrix": ({"equivalent matrix"}, "attention_matrix times v differs from the output by"),
    "OfHigherRank": ({"equivalent matrix"}, "the matrix has rank 16 at 6x8, declared at most 4: raise max_rank"),
    "OfOneMatrix": ({"equivalent matrix"}, "all channels have one matrix: leave channelwise out"),
    "WrongFactors": ({"factors"}, "left @ right.mT differs from the equivalent matrix by 1e-03 at 6x8"),
    "OverflowsInHalf": (FLOAT16, "not finite, though float64 gives at most"),
    "DividesByTheSpread": (NUMERICS, "32 of 32 not finite, nor in float64"),
    "CoarseInBfloat16": (BFLOAT16, "output differs from float64 by"),
    "CoarseGradientInHalf": (FLOAT16 | BFLOAT16, "gradient of k differs from float64 by"),
    "Quadratic": ({"growth of work"}, "bytes kept for backward ~ N^1.00, operations ~ N^2.00"),
    "DeclaredSlowerThanItIs": ({"growth of work"}, "declare complexity='O(N)'"),
}
LIMITED = {  # class -> the clauses that it declares that it does not support, and words of their notes
    "RefusesAnotherLength": ({"another size"}, "7x9: built for 196 keys, got a grid of 7x9"),
    "RefusesPrefix": ({"prefix tokens"}, "no place for prefix tokens"),
    "DeclaresAllKeys": ({"spatial reduction"}, "same_grid is True"),
    "RefusesToBeLarge": ({"growth of work"}, "at most 1000 tokens (at N=3136)"),
}


def test_the_sound_one_passes_every_clause_and_each_has_a_wrong_one() -> None:
    report = check_attention(wrong.Sound, quick=True)
    assert verdicts(report, Verdict.UNSUPPORTED) == {"position bias", "masked keys"}, f"\n{report}"
    assert verdicts(report, Verdict.UNDECLARED) == {"order of tokens"}
    assert len(verdicts(report, Verdict.PASS)) == len(report.lines) - 3, f"\n{report}"
    assert set().union(*(names for names, _ in WRONG.values())) == set(clauses(CONTRACT)[2:])


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_ends_the_check(name: str) -> None:
    report = check_attention(getattr(wrong, name), quick=True)
    assert [(line.name, line.verdict) for line in report.lines] == [
        ("constructor", Verdict.PASS),
        ("declarations", Verdict.FAIL),
    ]
    assert report["declarations"].note == UNREADABLE[name]


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_one_fails_its_clauses(name: str) -> None:
    names, words = WRONG[name]
    assert_fail(attention_lines(getattr(wrong, name), names), words)


@pytest.mark.parametrize("name", LIMITED)
def test_a_declared_limit_is_not_supported(name: str) -> None:
    names, words = LIMITED[name]
    for line in attention_lines(getattr(wrong, name), names):
        assert line.verdict is Verdict.UNSUPPORTED
        assert words in line.note


def test_a_refused_size_leaves_the_numbers_of_the_others() -> None:
    subject = AttentionSubject(wrong.RefusesToBeLarge, 32, 2, quick=False)
    with pytest.raises(ClauseError, match=r"^not N=3136: at most 1000 tokens; .*N=196") as caught:
        numerics(PRECISIONS[0])(subject)
    assert caught.value.verdict is Verdict.UNSUPPORTED


@pytest.mark.parametrize(
    ("spec", "clause", "words"),
    [
        (wrong.ResizesItsTable, "resizes its tables", "gain from 18x18 to 16x17, where the output is the same to "),
        (wrong.DropsInTraining, "batch independence", "in training, at one seed among others"),
        ("vssd", "equivalent matrix", ""),  # values are convolved before, so the matrix times them is not the output
    ],
)
def test_what_is_as_it_should_be_passes(spec: object, clause: str, words: str) -> None:
    (line,) = attention_lines(spec, {clause})
    assert line.verdict is Verdict.PASS
    assert words in line.note


def test_a_local_class_has_no_path_for_the_host() -> None:
    class Local(wrong.Sound):
        pass

    layer, copies = attention_lines(Local, {"attention layer", "copies"})
    assert layer.verdict is Verdict.UNSUPPORTED
    assert copies.verdict is Verdict.PASS  # without a pickle, which finds classes by their path
