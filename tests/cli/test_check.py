"""`linvit check`: names, class paths, options, exit codes."""

import importlib
import sys

import pytest

import linvit
from linvit.cli.check import main
from linvit.registry import Registry

MINE = '''
import linvit
from torch.nn import functional as F


class Mine(linvit.Attention):
    """Good enough."""

    def __init__(self, dim, num_heads, grid, *, key_dim=None, power=1):
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        if power > 2:
            raise linvit.UserError(f"power must be 1 or 2; got {power}")
        self.power = power

    def forward(self, q, k, v, grid):
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return (q @ (k.mT @ v) / k.shape[-2]) ** self.power
'''


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder with one's own mechanism in it, which works with power 1 and is not linear in v with power 2."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, ""])  # as the command line does
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def failures(text):
    return [line.split("  ")[1] for line in text.splitlines() if "  FAIL  " in line]


def test_a_class_in_this_folder(mine, capsys):
    assert main(["mine:Mine", "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mine:Mine: passed (")
    assert "torch.compile" not in out
    assert "not declared" in out


def test_a_failure_is_exit_code_1_and_names_its_line(mine, capsys):
    assert main(['{"name": "mine:Mine", "power": 2}', "--quick"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("mine:Mine, power=2: FAILED (")
    assert failures(out) == ["equivalent matrix"]


def test_an_exit_in_a_mechanism_is_a_failure_with_a_report(capsys):
    assert main(["tests.testing.wrong:ExitsInForward", "--quick"]) == 1
    out = capsys.readouterr().out
    assert failures(out) == ["declarations"]
    assert "SystemExit: no licence" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["focussed"], "no attention is called 'focussed'. Did you mean 'focused'?"),
        (["mine:Missing"], "attention class 'mine:Missing' cannot be imported"),
        (
            ["{name: mine:Mine, powers: 2}"],
            "attention 'mine:Mine' takes no option 'powers'. Did you mean 'power'",
        ),
        (["{name: mine:Mine, power: 3}"], "power must be 1 or 2; got 3"),
        (["{power: "], "the attention '{power: ' is neither JSON nor YAML."),
    ],
)
def test_mistakes_are_user_errors(mine, arguments, message, capsys):
    with pytest.raises(linvit.UserError) as error:
        main(arguments)
    assert str(error.value).startswith(message)
    assert capsys.readouterr().out == ""


def test_all_registered_with_a_summary(mine, capsys, monkeypatch):
    """One that cannot be imported does not keep the others from being checked."""
    registry = Registry("attention", "linvit.none", base="linvit.attention.base:Attention")
    monkeypatch.syspath_prepend(mine)
    registry.register("good")(importlib.import_module("mine").Mine)
    registry.register("bad")(type("Bad", (), {}))
    for module in ("linvit.cli.check", "linvit.testing.attention.inputs", "linvit.layers.attention_layer"):
        monkeypatch.setattr(f"{module}.attentions", registry)
    assert main(["--quick"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("bad: FAILED\n  attention 'bad' of module ")
    assert "\ngood: passed (" in out
    assert out.splitlines()[-2:] == ["1 of 2 passed", "failed: bad"]


SOUND = "tests.testing.wrong_backbones:Sound"


def test_a_backbone(capsys):
    arguments = ["--attention", "[linear, {name: softmax}]"]
    assert main(["--backbone", SOUND, "--img_size", "32", *arguments, "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{SOUND}: passed (")
    assert "torch.compile" not in out
    assert "(2, 16, 24)" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backbone", "swin_tinny"], "no backbone is called 'swin_tinny'. Did you mean 'swin_tiny'?"),
        (["--backbone", "{name: deit_nano, widths: 2}"], "backbone 'deit_nano' takes no option 'widths'."),
        (["--backbone", "deit_nano", "--attention", "[linear"], "--attention '[linear' is neither JSON nor YAML."),
        (["--backbone", "deit_nano", "--img_size", "[32]"], "img_size must be a positive side"),
        (["focused", "--attention", "linear"], "--attention is for a backbone"),
        (["--img_size", "32"], "--img_size is for a backbone"),
    ],
)
def test_mistakes_about_backbones_are_user_errors(arguments, message, capsys):
    with pytest.raises(linvit.UserError) as error:
        main([*arguments, "--quick"])
    assert str(error.value).startswith(message)
    assert capsys.readouterr().out == ""
