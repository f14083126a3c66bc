"""Declarations that cannot be read end a check in plain words; those that can are what the other lines go by."""

import pytest

from linvit.testing import Verdict, check_attention
from tests.testing import wrong_declarations
from tests.testing.helpers import verdicts

UNREADABLE = {
    "ComplexityInWords": "complexity must be one of O(N), O(N^2); got 'linear'.",
    "OtherProjections": "projections must be one of qkv, qv, kv; got 'qq'.",
    "OtherNorm": "proj_norm must be one of none, bn2d; got 'ln'.",
    "FlagInWords": "takes_bias must be True or False; got 'no'",
    "FractionalWidth": "out_dim must be a whole number at least 1; got 48.0",
    "UnevenWidth": "out_dim 33 is not divisible by num_heads 2",
    "BoundInWords": "rank_bound(grid) must be a whole number at least 0; got 'the width of the keys'",
    "OneFactor": "factors(q, k, grid) must be two tensors, left and right, or None; got a Tensor",
    "ReturnsItsState": "what forward returns must be one tensor (B, h, N, out_dim / h); got a tuple",
    "ReturnsNothing": "what forward returns must be one tensor (B, h, N, out_dim / h); got None",
    "CrashesInForward": "RuntimeError: out of luck (at forward)",
}
WRONG = {  # class -> the lines that it fails, all of them, and words of the first
    "NeedsAllKeys": (
        {"spatial reduction"},
        "; if keys must be as many as queries, declare fewer_keys = False",
    ),
    "NeedsWideKeys": (
        {"narrow keys"},
        "with key_dim=8; if keys must be as wide as values, declare narrow_keys = False",
    ),
    "IgnoresKeyDim": ({"narrow keys"}, "the attribute key_dim is another with key_dim=8; if keys must be as wide"),
    "TwiceAsWide": (
        {"equivalent matrix"},
        "out_dim differs from dim (64 and 32), so no one matrix takes the values to the output: declare "
        "probeable = False and give attention_matrix(q, k, v, grid)",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_said_once(name: str) -> None:
    report = check_attention(getattr(wrong_declarations, name), quick=True)
    assert [(line.name, line.verdict, line.note) for line in report.lines] == [
        ("declarations", Verdict.FAIL, UNREADABLE[name])
    ]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_so_fails_the_line_that_goes_by_it(name: str) -> None:
    lines, words = WRONG[name]
    report = check_attention(getattr(wrong_declarations, name), quick=True)
    assert set(report.failures) == lines, f"\n{report}"
    assert words in next(line.note for line in report.lines if line.name in lines)


@pytest.mark.parametrize(
    ("name", "line", "note"),
    [
        ("DeclaresAllKeys", "spatial reduction", "fewer_keys is False"),
        ("DeclaresWideKeys", "narrow keys", "narrow_keys is False"),
    ],
)
def test_what_is_declared_is_not_asked_for(name: str, line: str, note: str) -> None:
    report = check_attention(getattr(wrong_declarations, name), quick=True)
    assert report.passed, f"\n{report}"
    assert verdicts(report, Verdict.UNSUPPORTED) == {line, "position bias"}
    assert report[line].note == note
    assert report["cost"].verdict is Verdict.PASS


def test_neither_probed_nor_told_is_not_declared() -> None:
    report = check_attention(wrong_declarations.HasNoMatrix, quick=True)
    assert report.passed, f"\n{report}"
    assert {"equivalent matrix", "rank"} <= verdicts(report, Verdict.UNDECLARED)


def test_declarations_are_told() -> None:
    note = check_attention("softmax", quick=True)["declarations"].note
    assert note == "projections 'qkv', complexity O(N^2), narrow_keys, fewer_keys, takes_bias, probeable"
