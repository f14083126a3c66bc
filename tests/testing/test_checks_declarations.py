"""Declarations that cannot be read end a check; the other clauses rely on those that can."""

import pytest

from linvit import UserError
from linvit.testing import Verdict, check_attention
from tests.testing import wrong_declarations
from tests.testing.helpers import attention_lines

UNREADABLE = {
    "ComplexityInWords": "complexity must be one of O(N), O(N log N), O(N^1.5), O(N^2); got 'linear'.",
    "OtherProjections": "projections must be one of qkv, qv, kv, qk; got 'qq'.",
    "FlagInWords": "takes_bias must be True or False; got 'no'",
    "FractionalWidth": "out_dim must be a whole number at least 1; got 48.0",
    "UnevenWidth": "out_dim 33 is not divisible by out_heads 2",
    "StateInBytes": "state_size must be a whole number at least 1; got 1.5",
    "LinearWithoutMatrix": "no_matrix says 'its weights depend on the values', so linear_in_values must be False; "
    "got True",
    "BoundInWords": "rank_bound(grid) must be a whole number at least 1; got 'the width of the keys'",
    "OneFactor": "factors(q, k, grid) must be two tensors, left and right, or None; got a Tensor",
    "ReturnsItsState": "what forward returns must be one tensor (B, h, N, out_dim / h); got a tuple",
    "ReturnsNothing": "what forward returns must be one tensor (B, h, N, out_dim / h); got None",
    "CrashesInForward": "RuntimeError: out of luck (at forward)",
}
WRONG = {  # class -> the clauses that it breaks, all of them, and words of the first
    "NeedsAllKeys": (
        {"spatial reduction"},
        "; if keys must be as many as queries, declare fewer_keys = False",
    ),
    "NeedsWideKeys": (
        {"narrow keys"},
        "key_dim=8); if keys must be as wide as values, declare narrow_keys = False",
    ),
    "IgnoresKeyDim": ({"narrow keys"}, "the attribute key_dim is another with key_dim=8; if keys must be as wide"),
    "WrongChannels": (
        {"equivalent matrix", "factors", "channel matrix", "rank"},
        "WrongChannels mixes the channels of each token by a matrix A",
    ),
    "TwiceAsWide": (
        {"equivalent matrix"},
        "out_dim differs from dim (64 and 32), so no one matrix takes the values to the output: declare "
        "linear_in_values = False and give attention_matrix(q, k, v, grid)",
    ),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_ends_the_check(name: str) -> None:
    report = check_attention(getattr(wrong_declarations, name), quick=True)
    assert [(line.name, line.verdict) for line in report.lines] == [
        ("constructor", Verdict.PASS),
        ("declarations", Verdict.FAIL),
    ]
    assert report["declarations"].note == UNREADABLE[name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OtherNorm", "proj_norm must be one of none, bn2d"),
        ("GateInOtherWords", "gate must be one of none, linear, silu"),
    ],
)
def test_what_no_host_has_is_refused_when_it_is_built(name: str, words: str) -> None:
    with pytest.raises(UserError, match=f"{name}.{words}"):
        check_attention(getattr(wrong_declarations, name), quick=True)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_declaration_fails_the_clause_that_relies_on_it(name: str) -> None:
    names, words = WRONG[name]
    lines = attention_lines(getattr(wrong_declarations, name), names)
    assert all(line.verdict is Verdict.FAIL for line in lines), lines
    assert words in lines[0].note


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_it_fails_no_other_clause(name: str) -> None:
    report = check_attention(getattr(wrong_declarations, name), quick=True)
    assert set(report.failures) == WRONG[name][0], f"\n{report}"


@pytest.mark.parametrize(
    ("name", "clause", "note"),
    [
        ("DeclaresAllKeys", "spatial reduction", "fewer_keys is False"),
        ("DeclaresWideKeys", "narrow keys", "narrow_keys is False"),
    ],
)
def test_a_declared_limit_is_respected(name: str, clause: str, note: str) -> None:
    (line,) = attention_lines(getattr(wrong_declarations, name), {clause})
    assert line.verdict is Verdict.UNSUPPORTED
    assert line.note == note


def test_neither_probed_nor_given_is_not_declared() -> None:
    for line in attention_lines(wrong_declarations.HasNoMatrix, {"equivalent matrix", "rank"}):
        assert line.verdict is Verdict.UNDECLARED


def test_declarations_are_listed() -> None:
    (line,) = attention_lines("softmax", {"declarations"})
    declared = "narrow_keys, fewer_keys, takes_bias, linear_in_values, matrix_is_exact, equivariant, exports_any_size"
    assert line.note == f"projections 'qkv', complexity O(N^2), {declared}"
