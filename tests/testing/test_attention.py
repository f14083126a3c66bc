"""`check_attention` over what is registered, and what it makes of specs, crashes and its surroundings."""

from pathlib import Path

import pytest
import torch

import linvit
from linvit.testing import Verdict, check_attention
from linvit.testing.attention.check import CHECKS
from tests.testing import wrong
from tests.testing.helpers import verdicts

PLUGIN = Path(__file__).parent.parent / "plugin" / "linvit-cosine"


@pytest.mark.parametrize("name", linvit.list_attentions())
def test_every_registered_mechanism_passes(name: str) -> None:
    report = check_attention(name, quick=True)
    assert report.passed, f"\n{report}"


@pytest.mark.slow
@pytest.mark.parametrize("name", linvit.list_attentions())
def test_every_registered_mechanism_passes_in_full(name: str) -> None:
    report = check_attention(name)
    assert report.passed, f"\n{report}"


def test_a_third_partys_ten_lines_pass_and_declare_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLUGIN)
    report = check_attention("linvit_cosine:Cosine", quick=True)
    assert report.passed, f"\n{report}"
    silent = {"factors", "rank", "growth of work", "growth of time"}
    assert verdicts(report, Verdict.UNDECLARED) == silent
    assert report["cost"].note.startswith("200704 matmul MACs")  # 2 N C d
    assert "operations ~ N^1.00" in report["growth of work"].note


def test_options_of_a_spec_are_used() -> None:
    report = check_attention({"name": "linear", "feature_map": "relu", "relu_eps": 1e-6}, quick=True)
    assert report.subject == "linear, feature_map=relu, relu_eps=1e-06"
    assert report.passed, f"\n{report}"
    assert "0 transcendental" in report["cost"].note


def test_a_class_path_and_other_sizes() -> None:
    report = check_attention("tests.testing.wrong:Sound", quick=True, dim=24, num_heads=3)
    assert report.passed, f"\n{report}"
    assert report["shape and dtype"].note.startswith("(3, 3, 196, 8)")


def test_a_crash_in_the_constructor_is_a_failure() -> None:
    report = check_attention(wrong.CrashesAtConstruction, quick=True)
    assert report.failures == ["construction"]
    assert report["construction"].note == "RuntimeError: out of luck and more"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("focussed", "no attention is called 'focussed'. Did you mean 'focused'?"),
        ({"name": "focused", "focusing": 4}, "attention 'focused' takes no option 'focusing'."),
        ({"name": "focused", "focusing_factor": 0.5}, "focusing_factor must be a number at least 1"),
        ("tests.testing.wrong:Missing", "attention class 'tests.testing.wrong:Missing' cannot be imported"),
        ("tests.testing.wrong_declarations:TakesOnlyDim", "must take dim, num_heads, grid; it lacks num_heads, grid"),
        (torch.nn.Linear, "Linear is not a subclass of linvit.Attention"),
    ],
)
def test_what_the_caller_can_mend_is_raised(spec: object, message: str) -> None:
    with pytest.raises(linvit.UserError) as error:
        check_attention(spec)
    assert message in str(error.value)


def test_random_numbers_threads_and_warnings_of_the_caller_stay() -> None:
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    check_attention(wrong.Random, quick=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_ctrl_c_is_the_users() -> None:
    class Interrupted(wrong.Sound):
        def forward(self, *args: object) -> torch.Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_attention(Interrupted, quick=True)


def test_a_quick_run_leaves_out_the_compiler() -> None:
    assert [check.name for check in CHECKS if not check.quick] == ["torch.compile", "torch.export"]
