"""The front door: help, version, verbs, exit codes."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import linvit
from linvit.cli import WAITING, main
from linvit.cli.training import command_line as train
from tests.plugin.distributions import python

VERBS = ["fit", "validate", "test", "predict"]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"], []], ids=str)
def test_help_names_every_verb(arguments, capsys):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for verb in [*VERBS, "list"]:
        assert re.search(rf"^  {verb} ", out, re.MULTILINE)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"linvit {version('linvit')}\n"


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
    assert ", ".join(VERBS) in err


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


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()], ids=repr)
def test_a_bug_is_not_hidden(monkeypatch, error):
    monkeypatch.setattr(train, "train", raising(error))
    with pytest.raises(type(error)):
        main(["fit"])


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
        ({"KMP_BLOCKTIME": "5"}, (None, None)),
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
linvit.cli.main(["fit", "--help"])
"""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "PASSIVE\n", done.stderr


def test_a_verb_that_meets_a_broken_package_says_how_to_find_it(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken')", encoding="utf-8")
    done = python("-m", "linvit", "fit", "--config", "quickstart", path=tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert "pip check names packages that do not fit" in done.stderr
