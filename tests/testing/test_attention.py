"""`check_attention`: what it makes of specs, crashes and its surroundings."""

from pathlib import Path

import pytest
import torch

import linvit
from linvit.testing import Verdict, check_attention
from linvit.testing.attention.inputs import AttentionSubject
from linvit.testing.attention.precision import PRECISIONS, numerics
from linvit.testing.attention.shape import shape
from tests.testing import wrong
from tests.testing.helpers import attention_lines, verdicts

PLUGIN = Path(__file__).parent.parent / "plugin" / "linvit-cosine"


def test_a_third_partys_ten_lines_pass_and_declare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLUGIN)
    report = check_attention("linvit_cosine:Cosine", quick=True)
    assert report.passed, f"\n{report}"
    assert verdicts(report, Verdict.UNDECLARED) == {"factors", "order of tokens", "growth of work"}
    assert "operations ~ N^1.00" in report["growth of work"].note


def test_options_of_a_spec_are_used() -> None:
    subject = AttentionSubject({"name": "linear", "feature_map": "relu", "relu_eps": 1e-6}, 32, 2, quick=True)
    assert str(subject) == "linear, feature_map=relu, relu_eps=1e-06"
    assert subject.build().relu_eps == 1e-6


def test_a_class_path_and_other_sizes() -> None:
    subject = AttentionSubject("tests.testing.wrong:Sound", 24, 3, quick=True)
    assert shape(subject).startswith("(3, 3, 196, 8)")


def test_a_crash_in_the_constructor_is_a_failure() -> None:
    report = check_attention(wrong.CrashesAtConstruction, quick=True)
    assert [line.name for line in report.lines] == report.failures == ["constructor"]
    assert report["constructor"].note == "RuntimeError: out of luck and more"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "TakesOnlyDim",
            "its constructor takes no num_heads (heads), grid (positions of the tokens). linvit.Attention has all "
            "members to inherit",
        ),
        ("NeedsAnOption", "no host supplies width: give it a default"),
        ("NarrowByDefault", "key_dim has the default 8 instead of None"),
    ],
)
def test_a_constructor_that_hosts_cannot_call(name: str, words: str) -> None:
    report = check_attention(getattr(wrong, name), quick=True)
    assert [line.name for line in report.lines] == report.failures == ["constructor"]
    assert report["constructor"].note == words


def test_an_option_without_a_default_is_for_the_spec_to_set() -> None:
    spec = {"name": "tests.testing.wrong:NeedsAnOption", "width": 2}
    (line,) = attention_lines(spec, {"constructor"})
    assert line.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("focussed", "no attention is called 'focussed'. Did you mean 'focused'?"),
        ({"name": "focused", "focusing": 4}, "attention 'focused' takes no option 'focusing'."),
        ({"name": "focused", "focusing_factor": 0.5}, "focusing_factor must be a number at least 1"),
        ("tests.testing.wrong:Missing", "attention class 'tests.testing.wrong:Missing' cannot be imported"),
        (torch.nn.Linear, "Linear is not a subclass of linvit.Attention"),
    ],
)
def test_what_the_caller_can_fix_is_raised(spec: object, message: str) -> None:
    with pytest.raises(linvit.UserError) as error:
        check_attention(spec)
    assert message in str(error.value)


def test_random_numbers_of_the_caller_stay() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    attention_lines(wrong.Random, {"determinism", "copies"})
    assert torch.equal(torch.get_rng_state(), state)


def test_ctrl_c_is_the_users() -> None:
    class Interrupted(wrong.Sound):
        def forward(self, *args: object) -> torch.Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attention_lines(Interrupted, {"shape and dtype"})


def test_an_ill_conditioned_mechanism_passes() -> None:
    """A normaliser of ReLUs comes near 0, where float64 itself moves by as much when its inputs are rounded."""
    spec = {"name": "linear", "feature_map": "relu"}
    for line in attention_lines(spec, {f"numerics, {precision.name}" for precision in PRECISIONS[:3]}):
        assert line.verdict is Verdict.PASS, line
        assert "gradient of " in line.note


def test_a_gradient_that_cancels_to_nothing_has_no_digits_to_compare() -> None:
    """Distances of 64 channels are so large that the landmarks' kernel is the identity but for 1e-8."""
    assert numerics(PRECISIONS[0])(AttentionSubject("soft_norm", 64, 1, quick=True))
