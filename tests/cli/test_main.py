"""The front door: help, version, verbs, exit codes."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import linvit
from linvit.cli import HELP, OWN, WAITING, main
from linvit.cli.training import command_line as train
from tests.plugin.distributions import forget_packages, python, write_distribution


@pytest.mark.parametrize("arguments", [["help"], []], ids=str)
def test_help_names_every_verb(arguments, capsys):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for verb in OWN:
        assert re.search(rf"^  {verb}(  |$)", out, re.MULTILINE)


def test_python_m_linvit_and_the_console_script_are_the_same():
    module = python("-m", "linvit", "--version")
    script = shutil.which("linvit", path=str(Path(sys.executable).parent))
    installed = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert (
        (module.returncode, module.stdout)
        == (installed.returncode, installed.stdout)
        == (0, f"linvit {version('linvit')}\n")
    )


def test_an_unknown_verb(capsys):
    assert main(["fitt"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("linvit: error: linvit has no verb 'fitt'.")
    assert ", ".join(OWN) in err


def test_the_entry_points_repeat_the_table():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["linvit.verbs"] == OWN
    assert re.findall(r"^  ([a-z-]+)(?=  |$)", HELP, re.MULTILINE) == [*OWN]


GREET = """
from linvit.errors import UserError

def greet(argv):
    if not argv:
        raise UserError("greet whom?")
    print("hello", *argv)
    return len(argv) - 1
"""


@pytest.fixture
def greet(tmp_path, monkeypatch):
    """A package with the verb `greet`, which this process sees; returns a function that installs another."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name="linvit-greet", verb="greet", **modules):
        points = f"[linvit.verbs]\n{verb} = {next(iter(modules))}:greet\n"
        write_distribution(tmp_path, name, "1.0", points, **modules)
        importlib.invalidate_caches()
        forget_packages()

    install(verb_greet=GREET)
    yield install
    monkeypatch.undo()
    forget_packages()
    sys.modules.pop("verb_greet", None)


def test_a_verb_of_another_package(greet, capsys):
    """It is listed with its package and not imported before it is called; its exit code and its errors are ours."""
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith(HELP)
    assert "verb_greet" not in sys.modules
    assert main(["greet", "you", "--help"]) == 1
    assert capsys.readouterr().out == "hello you --help\n"
    assert main(["greet", "you"]) == 0
    assert main(["greet"]) == 2
    assert capsys.readouterr().err == "linvit: error: greet whom?\n"


def test_a_verb_of_another_package_does_not_replace_one_of_linvit(greet, capsys):
    greet("linvit-other", "list", verb_other=GREET)
    assert main(["list"]) == 2
    err = capsys.readouterr().err
    assert "linvit (linvit.cli.list:main) and linvit-other 1.0 (verb_other:greet)" in err
    assert main(["--version"]) == 0


@pytest.mark.parametrize("code", ["raise SystemExit(0)\n", "def (:\n", ""])
def test_a_broken_verb_is_named_with_its_package(greet, code, capsys):
    greet("linvit-broken", "breaks", verb_breaks=code)
    assert main(["breaks"]) == 2
    err = capsys.readouterr().err
    assert "verb 'breaks' of linvit-broken 1.0 cannot be imported from 'verb_breaks:greet'" in err
    assert main(["greet", "you"]) == 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("verb_greet:__name__", "is 'verb_greet', not a function"),
        ("verb_greet", "a function: 'verb_greet:NAME'"),
    ],
)
def test_a_verb_is_a_function(greet, tmp_path, target, message, capsys):
    points = tmp_path / "linvit_greet-1.0.dist-info" / "entry_points.txt"
    points.write_text(f"[linvit.verbs]\ngreet = {target}\n")
    forget_packages()
    assert main(["greet"]) == 2
    assert message in capsys.readouterr().err


def raising(error):
    def train(argv):
        raise error

    return train


def test_the_users_mistake_is_printed_even_if_a_library_wrapped_it(monkeypatch, capsys):
    wrapped = ValueError("wrapped")
    wrapped.__cause__ = RuntimeError("twice")
    wrapped.__cause__.__cause__ = linvit.UserError("no such thing")
    monkeypatch.setattr(train, "train", raising(wrapped))
    assert main(["fit"]) == 2
    assert capsys.readouterr().err == "linvit: error: no such thing\n"


def test_output_that_nobody_reads_to_the_end_is_no_failure():
    command = f"{sys.executable} -m linvit list | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.split()[0] == "attentions"


@pytest.mark.parametrize(
    ("set_by_user", "expected"),
    [
        ({}, ("PASSIVE", "10000")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
    ],
    ids=str,
)
def test_threads_sleep_soon_while_they_wait_unless_the_user_has_set_how(set_by_user, expected, monkeypatch):
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in set_by_user.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(train, "train", lambda argv: seen.append([*map(os.environ.get, WAITING[:2])]))
    assert main(["fit"]) == 0
    assert seen == [[*expected]]


def test_the_setting_is_made_before_torch_is_imported():
    """OpenMP reads it when its library is loaded."""
    code = """
import os, sys

class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            print(os.environ["OMP_WAIT_POLICY"], flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
import linvit.cli
linvit.cli.main(["fit", "--help=all"])
"""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "PASSIVE\n", done.stderr


@pytest.mark.parametrize(
    ("error", "solution"),
    [
        ("ImportError('broken')", "pip check lists incompatible packages"),
        (
            "RuntimeError('operator torchvision::nms does not exist')",  # torch's CPU build, torchvision's of CUDA
            "torch and torchvision are of different builds; install both together",
        ),
    ],
)
def test_a_verb_that_meets_a_broken_package_says_how_to_find_it(error, solution, tmp_path):
    (tmp_path / "torch.py").write_text(f"raise {error}", encoding="utf-8")
    done = python("-m", "linvit", "fit", "--config", "quickstart", path=tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert solution in done.stderr
