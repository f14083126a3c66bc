"""`make quickstart` continues after an interruption. A script stands for linvit, so nothing is installed or trained."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RUNS = "checkpoints/quickstart"
PROGRAM = f"""#!/bin/sh
echo linvit "$@" >> calls
[ "$1" = test ] && echo "test/score 0.98" && exit 0
saved={RUNS}/version_$(cat number)/checkpoints
mkdir -p $saved
touch $saved/../config.yaml
[ -f interrupted ] && rm interrupted && kill -INT $PPID && exit 130
[ ! -f failing ]
"""


@pytest.fixture
def folder(tmp_path):
    """The Makefile in a folder where everything is installed."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    shutil.copy(ROOT / "Makefile", tmp_path)
    for file in ("pyproject.toml", "setup.py", "constraints.txt", ".venv/installed", ".venv/bin/linvit", "number"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    (tmp_path / ".venv/bin/linvit").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / ".venv/bin/linvit").chmod(0o755)
    (tmp_path / "number").write_text("0", encoding="utf-8")
    return tmp_path


def make(folder):
    """`make quickstart`, and the calls of linvit that it made."""
    (folder / "calls").unlink(missing_ok=True)
    done = subprocess.run(
        ["make", "quickstart"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )
    calls = folder / "calls"
    return done, calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []


def test_it_trains_and_tests_once(folder):
    run = f"{RUNS}/version_0"
    done, calls = make(folder)
    assert done.returncode == 0, done.stderr
    test = f"linvit test --config {run}/config.yaml --ckpt_path {run}/checkpoints/best_ema.ckpt"
    assert calls == ["linvit fit --config quickstart", test]
    assert "test/score 0.98" in done.stdout
    done, calls = make(folder)
    assert calls == []
    assert "test/score 0.98" in done.stdout


@pytest.mark.parametrize("way", ["interrupted", "failing"])
def test_it_goes_on_with_the_run_that_was_interrupted(folder, way):
    """And with no other: the user may have trained more since."""
    run = f"{RUNS}/version_3"
    (folder / RUNS / "version_2").mkdir(parents=True)
    (folder / "number").write_text("3", encoding="utf-8")
    (folder / way).touch()
    done, _ = make(folder)
    assert done.returncode != 0
    assert ("resume with: make quickstart" in done.stdout) == (way == "interrupted")
    (folder / "failing").unlink(missing_ok=True)
    (folder / RUNS / "version_4").mkdir(parents=True)
    (folder / RUNS / "version_4/config.yaml").touch()
    done, calls = make(folder)
    assert done.returncode == 0, done.stderr
    assert calls[0] == f"linvit fit --config {run}/config.yaml --resume=auto"
    assert calls[1].startswith(f"linvit test --config {run}/")
    assert not (folder / RUNS / "unfinished").exists()


def test_a_run_that_ended_before_it_saved_its_configuration_starts_anew(folder):
    (folder / "failing").touch()
    assert make(folder)[0].returncode != 0
    (folder / "failing").unlink()
    (folder / RUNS / "version_0/config.yaml").unlink()
    (folder / "number").write_text("1", encoding="utf-8")
    done, calls = make(folder)
    assert calls[0] == "linvit fit --config quickstart"
    assert f"{RUNS}/version_1/" in calls[1]
    assert done.returncode == 0
