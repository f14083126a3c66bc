"""Runs of several processes: equal to one process, and of one mind when one of them ends."""

import inspect
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback
from lightning.pytorch.strategies.launchers import subprocess_script
from torch.distributed import HashStore

from linvit import create_backbone
from linvit.io.signals import STOP
from linvit.runs import endings
from tests.cli import forked
from tests.cli.runs import QUICKSTART, events, flags, tiny

ROOT = Path(__file__).parents[2]
LONG = tiny(trainer__max_epochs=1000, trainer__limit_val_batches=1)


class Fail(Callback):
    """Fails in a step of a rank."""

    def __init__(self, rank: int, step: int = 12):
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer, *args):
        """Raises an error."""
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            raise ZeroDivisionError("nothing to divide by")


def failing(rank):
    """Options of a run whose rank fails."""
    return [f"--trainer.callbacks+={__name__}.Fail", f"--trainer.callbacks.rank={rank}"]


def start(root, *options, launcher="torchrun"):
    """Two ranks of a long run, forked from this process, when they have saved a checkpoint."""
    run = forked.Ranks(["fit", f"--config={QUICKSTART}", *LONG, *options], root, 2, launcher)
    deadline = time.monotonic() + 120
    while not list(root.rglob("last.ckpt")) and run.started[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    return run


def said(text):
    """The one line that says why the run has ended, and no traceback; the command that continues is below."""
    assert "Traceback" not in text
    (line,) = re.findall(r"^linvit: error: (.*)$", text, re.MULTILINE)
    assert "resume with\n  linvit fit --config checkpoints/quickstart/version_0/config.yaml --resume=auto\n" in text
    return line


@pytest.mark.parametrize(
    ("rank", "error", "launcher_speaks", "said"),
    [
        (0, "oh", False, True),
        (1, "oh", False, True),
        (1, "oh", True, False),  # rank 0 has met the same mistake, and the launcher ends all
        (0, "Connection closed by peer [127.0.0.1]:1234", False, True),
        (0, "Connection closed by peer [127.0.0.1]:1234", True, False),
        (1, "gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms", False, True),  # another is stopped
    ],
)
def test_a_rank_says_why_it_ends_unless_its_launcher_ends_it_first(monkeypatch, rank, error, launcher_speaks, said):
    found = endings.Ranks(SimpleNamespace(global_rank=rank, world_size=1, callbacks=[]))
    lines = []
    found.say = lines.append
    monkeypatch.setattr(endings, "GRACE", 0.5)
    monkeypatch.setattr(STOP, "received", None)

    def sleep(seconds):
        STOP.received = signal.SIGTERM if launcher_speaks else None

    monkeypatch.setattr(endings.time, "sleep", sleep)
    found.explain(RuntimeError(error), "RuntimeError: why")
    other = "another rank has ended, was stopped or does not respond: " * (error != "oh")
    line = f"rank {rank} (host {os.uname().nodename}, pid {os.getpid()}): {other}RuntimeError: why"
    assert lines == [line] * said


@pytest.mark.parametrize(
    ("code", "ending"),
    [
        (143, (143, "ended by a signal to rank 1 (host a, pid 7)")),
        (-11, (1, "rank 1 (host a, pid 7) was killed by SIGSEGV")),
        (-9, (1, "rank 1 (host a, pid 7) was killed by SIGKILL, perhaps out of memory")),
        (2, (2, "")),  # which has said why it ended
    ],
)
def test_how_a_child_has_ended_is_known(monkeypatch, code, ending):
    found = endings.Ranks(SimpleNamespace(global_rank=0, world_size=1, callbacks=[]))
    said = [""]
    found.say = said.append
    monkeypatch.setattr(endings.socket, "gethostname", lambda: "a")
    monkeypatch.setattr(STOP, "children", [SimpleNamespace(poll=lambda: code, returncode=code, pid=7)])

    def leave(code, message=""):
        raise SystemExit(code, message or said[-1])

    monkeypatch.setattr(STOP, "exit_now", leave)
    with pytest.raises(SystemExit) as left:
        found._wait_for_children()
    assert left.value.args == ending


@pytest.mark.parametrize(("restarts", "machines", "met"), [("0", "1", False), ("1", "1", True), ("1", "2", False)])
def test_ranks_that_torchrun_has_restarted_find_nothing_of_those_before(monkeypatch, restarts, machines, met):
    kept, stores = HashStore(), []
    kept.set("address", "of a process that was ended")
    monkeypatch.setattr(endings, "TCPStore", lambda host, port: kept)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda store, **_: stores.append(store))
    given = {"TORCHELASTIC_RESTART_COUNT": restarts, "GROUP_WORLD_SIZE": machines, "RANK": "0", "WORLD_SIZE": "1"}
    given |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    endings.meet_after_a_restart()
    assert [store.check(["address"]) for store in stores] == [False] * met


def test_private_names_of_lightning():
    said = "endings.py has to keep Lightning from killing all processes by another name than _launch_process_observer"
    observer = getattr(subprocess_script, "_launch_process_observer", lambda: None)
    assert list(inspect.signature(observer).parameters) == ["child_processes"], said
    launcher = subprocess_script._SubprocessScriptLauncher(LightningEnvironment(), 2, 1)
    launcher._call_children_scripts = lambda: None
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess_script, "_launch_process_observer", asked.append)
        launcher.launch(lambda: None)
    assert asked == [launcher.procs], said


@pytest.mark.slow
class TestEnds:
    """All processes end, and one line says why."""

    @pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_killed_rank_is_named(self, tmp_path, launcher, victim):
        run = start(tmp_path, launcher=launcher)
        pid = run.rank(victim)
        run.send(signal.SIGKILL, [victim])
        codes = run.wait()
        assert run.left() == []
        assert sorted(codes) == ([-9, 1] if launcher == "torchrun" else [-9 if victim == 0 else 1])
        if launcher == "torchrun":  # which says it
            assert "Traceback" not in run.text()
            assert "linvit: error" not in run.text()
            return
        name = f"rank {victim} (host {os.uname().nodename}, pid {pid})"
        assert said(run.text()) == f"{name} was killed{' by SIGKILL' * victim}, perhaps out of memory"

    @pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_that_fails_is_named(self, tmp_path, launcher, rank):
        run = start(tmp_path, *failing(rank), launcher=launcher)
        codes = run.wait()
        assert run.left() == []
        assert codes == [1] * len(codes)
        file = f"checkpoints/quickstart/version_0/traceback_rank_{rank}.txt"
        line = rf"rank {rank} \(host .*, pid \d+\): ZeroDivisionError: nothing to divide by; its traceback is in {file}"
        assert re.fullmatch(line, said(run.text()))
        assert "in on_train_batch_start" in (tmp_path / file).read_text(encoding="utf-8")

    def test_a_killed_loader_process_is_named(self, tmp_path):
        run = start(tmp_path, *flags(data__num_workers=1))
        children = Path(f"/proc/{run.rank(1)}/task/{run.rank(1)}/children").read_text(encoding="utf-8").split()
        os.kill(int(children[0]), signal.SIGKILL)
        assert run.wait() == [1, 1]
        assert run.left() == []
        assert re.match(r"rank 1 \(.*\): loader process: DataLoader worker \(pid \d+\) is killed", said(run.text()))

    def test_loaders_outlive_a_signal_to_all_processes(self, tmp_path):
        run = start(tmp_path, *flags(data__num_workers=1))
        assert run.started[0].poll() is None, run.text()
        for rank in (0, 1):
            children = Path(f"/proc/{run.rank(rank)}/task/{run.rank(rank)}/children").read_text(encoding="utf-8")
            for pid in [run.rank(rank), *children.split()]:
                os.kill(int(pid), signal.SIGTERM)
        assert run.wait() == [143, 143]
        assert run.left() == []
        assert "ended by SIGTERM at step" in run.text()
        assert "could not be saved" not in run.text()

    @pytest.mark.parametrize(
        "command", [["-m", "linvit"], ["-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "linvit"]]
    )
    def test_whole_processes(self, tmp_path, command):
        options = [*LONG, *failing(1), "--trainer.devices=2", "--trainer.strategy=ddp"]
        done = subprocess.run(
            [sys.executable, *command, "fit", f"--config={QUICKSTART}", *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        own, _, launcher = done.stderr.partition("linvit: error: ")
        assert "Traceback" not in own
        assert launcher.startswith("rank 1 (host ")
        assert "linvit: error" not in launcher
        if command == ["-m", "linvit"]:
            assert len(launcher.splitlines()) == 3, launcher


@pytest.mark.slow
@pytest.mark.parametrize("teacher", [{}, {"model__attention": "linear", "model__teacher__attention_inputs": "teacher"}])
def test_two_ranks_have_the_gradients_of_one_with_the_double_batch(tmp_path, teacher):
    found = []
    if teacher:  # some parameters of the student then get no gradient
        network = create_backbone({"name": "deit_nano", "depth": 1}, num_classes=10, img_size=32)
        torch.save(network.state_dict(), tmp_path / "teacher.pth")
        teacher["model__teacher__source"] = tmp_path / "teacher.pth"
    for number, batch in ((1, 16), (2, 8)):
        root = tmp_path / str(number)
        root.mkdir()
        # in float64: Adam makes rounding of a gradient that is nearly 0 a whole step
        precision = {"trainer__precision": "64-true"}
        options = flags(data__batch_size=batch, model__warmup_epochs=0, trainer__max_epochs=1, **precision, **teacher)
        run = forked.Ranks(["fit", f"--config={QUICKSTART}", *tiny(), *options], root, number)
        assert run.wait() == [0] * number, run.text()
        curves = events(root / "checkpoints" / "quickstart" / "version_0")
        checkpoint = torch.load(next(root.rglob("last.ckpt")), weights_only=True)
        found.append((curves, checkpoint["state_dict"]))
    (one, alone), (two, shared) = found
    (norm,) = [tag for tag in one if "grad_norm" in tag]
    assert [value for _, value in two[norm]] == pytest.approx([value for _, value in one[norm]], rel=1e-6)
    assert [value for _, value in two["val/loss"]] == pytest.approx([value for _, value in one["val/loss"]], rel=1e-6)
    for name, weight in alone.items():
        torch.testing.assert_close(shared[name], weight, rtol=1e-9, atol=1e-9)
