"""`linvit doctor` on installations that are whole, and on those that are broken in every way that one meets."""

import pytest
from packaging.requirements import Requirement

from linvit import entries
from linvit.cli import doctor
from tests.plugin.distributions import python, write_distribution


@pytest.fixture
def torch_is_well(monkeypatch):
    """torch and the others, whose import takes seconds, are taken to be whole."""
    monkeypatch.setattr(doctor, "_imports", lambda timeout: [])


@pytest.fixture
def installed_here(monkeypatch, tmp_path):
    """A folder of packages that is looked at first."""
    monkeypatch.syspath_prepend(tmp_path)
    entries.announced.cache_clear()
    yield tmp_path
    entries.announced.cache_clear()


def run(capsys, *arguments):
    """The exit code, and what is printed."""
    code = doctor.main(list(arguments))
    return code, capsys.readouterr().out


@pytest.mark.slow
def test_this_installation_is_whole(tmp_path):
    done = python("-m", "linvit", "doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[-1] == "nothing is wrong"
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for word in ("python", "packages", "timm ", "machine", "output", "temporary", "devices", "cpu", "plug-ins"):
        assert word in done.stdout


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "ImportError: libcudart.so.12: cannot open"),
        ("raise SystemExit(3)", "code 3"),
        ("import os; os.abort()", "SIGABRT"),
        ("import os; os._exit(0)", "ends the process with code 0"),
        ("import time; time.sleep(60)", "takes more than 1 s"),
        ("", "AttributeError"),  # a file of the user's that is called torch.py
    ],
)
def test_torch_is_broken(installed_here, capsys, source, said):
    (installed_here / "torch.py").write_text(source, encoding="utf-8")
    code, out = run(capsys, f"--timeout={1 if 'sleep' in source else 60}")
    text = " ".join(out.split())
    assert code == 1
    assert said in text
    assert "1 found to be wrong 1. t" in text
    assert "pip install --force-reinstall torch torchvision" in text
    assert "plug-ins not looked at: they need torch" in text


def test_the_command_itself_imports_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('imported')", encoding="utf-8")
    done = python("-m", "linvit", "doctor", path=tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    said = f"torch cannot be imported from {tmp_path / 'torch.py'}: RuntimeError: imported"
    assert said.replace(" ", "") in "".join(done.stdout.split())
    assert not done.stderr


def test_packages_that_are_missing_or_old(torch_is_well, monkeypatch, capsys):
    found = {"torch": "2.9.1+cu128", "timm": None, "numpy": "2.0.0rc1"}
    plain = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: found.get(name, plain(name)))
    code, out = run(capsys)
    text = " ".join(out.split())
    assert code == 1
    assert "2 found to be wrong" in text
    assert "torch 2.9.1+cu128 does not fit linvit, which needs torch>=2.11 pip install 'torch>=2.11'" in text
    assert "timm is not installed pip install 'timm>=" in text


@pytest.mark.parametrize(("version", "problems"), [("2.11", 0), ("2.11.0+cu130", 0), ("2.9", 1), ("3rc1", 0)])
def test_versions_compare_as_numbers(monkeypatch, version, problems):
    monkeypatch.setattr(doctor, "requirements", lambda: [Requirement("x>=2.11")])
    plain = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: version if name == "x" else plain(name))
    assert len(list(doctor._installation())) == problems


def test_linvit_is_not_installed(torch_is_well, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "requirements", list)
    code, out = run(capsys)
    assert code == 1
    assert "linvit itself is not installed" in out


def test_requirements_are_those_of_the_metadata():
    needed = {one.name: str(one.specifier) for one in doctor.requirements()}
    assert needed["jsonargparse"].startswith(">=")
    assert "pytest" not in needed


def test_broken_plugins_are_named(torch_is_well, installed_here, monkeypatch, capsys):
    points = "[linvit.attentions]\nbroken = broken_plugin:Broken\n"
    write_distribution(installed_here, "linvit-bad", "1.0", points, broken_plugin="raise RuntimeError('\\x1b[31mno')")
    code, out = run(capsys)
    text = " ".join(out.split())
    assert code == 1
    assert "attention broken (linvit-bad 1.0): broken, see below" in text
    assert "attention 'broken' of linvit-bad 1.0: RuntimeError: \\x1b[31mno fix or uninstall linvit-bad 1.0" in text
    assert "\x1b" not in out


def test_too_little_shared_memory_and_disk(torch_is_well, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(doctor, "LEAST_SHARED", 2**60)
    monkeypatch.setattr(doctor, "LEAST_DISK", 2**60)
    (tmp_path / "file").touch()
    code, out = run(capsys, f"--output={tmp_path / 'file' / 'runs'}")
    text = " ".join(out.split())
    assert code == 1
    assert "4 found to be wrong" in text
    for part in ("--shm-size=8g", "use another disk", "Not a directory", "--trainer.default_root_dir"):
        assert part in text


def test_every_problem_has_a_number_and_a_remedy(torch_is_well, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_installation", lambda: [("a is wrong", "fix a"), ("b", "fix b")])
    _, out = run(capsys)
    assert out.endswith("\n2 found to be wrong\n  1.  a is wrong\n      fix a\n  2.  b\n      fix b\n")


def test_a_verb_that_meets_a_broken_torch_points_here(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken')", encoding="utf-8")
    done = python("-m", "linvit", "fit", "--config", "quickstart", path=tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert "linvit doctor says how to fix it" in done.stderr
