"""`check_head`: a sound head passes, and each kind of mistake fails its clause."""

import pytest
from torch import nn

from linvit import UserError
from linvit.cli.check import main
from linvit.testing import check_head
from tests.testing.wrong_heads import WRONG, Sound


def test_a_sound_head_passes() -> None:
    report = check_head(Sound, quick=True)
    assert report.passed, f"\n{report}"
    assert report.subject == "tests.testing.wrong_heads:Sound"
    assert report["shapes"].note == "logits (2, 7, 16, 32) at 64x128"


@pytest.mark.parametrize("head", WRONG, ids=lambda head: head.breaks)
def test_a_mistake_fails_its_clause(head: type[Sound]) -> None:
    assert head.breaks in check_head(head, quick=True).failures


def test_what_is_no_head() -> None:
    with pytest.raises(UserError, match="no head is called 'uppernet'. Did you mean 'upernet'".replace(".", r"\.")):
        check_head("uppernet")
    with pytest.raises(UserError, match="not a subclass of"):
        check_head("torch.nn:Linear")
    assert check_head(nn.Linear).failures == ["constructor"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--head", "tests.testing.wrong_heads:Sound", "--quick", "--img_size", "[32, 64]"]) == 0
    assert "logits (2, 7, 8, 16) at 32x64" in capsys.readouterr().out
    assert main(["--head", "tests.testing.wrong_heads:Unused", "--quick"]) == 1
    with pytest.raises(SystemExit):
        main(["focused", "--head", "fcn"])
    assert "not allowed with" in capsys.readouterr().err
