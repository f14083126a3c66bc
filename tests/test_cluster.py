"""The job script of docs/guides/cluster.md, with stand-ins for SLURM's commands, and torchrun's restarts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from tests.cli.runs import QUICKSTART, flags, tiny

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "docs" / "guides" / "linvit.sbatch"
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for ((i = 0; i < SLURM_NTASKS; i++)); do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & pids+=($!); done
echo "${pids[@]}" > pids
for pid in "${pids[@]}"; do wait "$pid"; code=$?; ((code > highest)) && highest=$code; done
exit "${highest:-0}"
"""
SCONTROL = """#!/bin/bash
echo "$@" >> requeued
"""


class FailOnce(Callback):
    """Fails on rank 1 unless torchrun has restarted it."""

    def on_train_batch_start(self, trainer, *args):
        """Raises an error."""
        if trainer.global_rank == 1 and trainer.global_step == 12 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ZeroDivisionError


@pytest.fixture
def environment(tmp_path):
    """Variables of a job of two tasks, and the commands of SLURM."""
    commands = {"srun": SRUN, "scontrol": SCONTROL, "linvit": f'#!/bin/bash\nexec "{sys.executable}" -m linvit "$@"\n'}
    for name, text in commands.items():
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(text, encoding="utf-8")
        command.chmod(0o755)
    slurm = {"JOB_ID": str(os.getpid()), "NTASKS": "2", "NTASKS_PER_NODE": "2", "NNODES": "1", "NODEID": "0"}
    return {
        **os.environ,
        **{f"SLURM_{name}": value for name, value in slurm.items()},
        "SLURM_JOB_NAME": "linvit",
        "SLURM_NODELIST": "127.0.0.1",
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.slow
def test_a_job_that_runs_out_of_time_is_queued_again_and_goes_on(tmp_path, environment):
    command = ["bash", str(SCRIPT), f"--config={QUICKSTART}", *tiny(), "--trainer.max_epochs=1000"]
    with (tmp_path / "log").open("w", encoding="utf-8") as log:
        job = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
    last = tmp_path / "checkpoints" / "quickstart" / "version_0" / "checkpoints" / "last.ckpt"
    deadline = time.monotonic() + 300
    while not last.exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in (tmp_path / "pids").read_text(encoding="utf-8").split():
        os.kill(int(pid), signal.SIGUSR1)
    text = (tmp_path / "log").read_text(encoding="utf-8")
    assert job.wait(timeout=120) == 143, text
    assert (tmp_path / "requeued").read_text(encoding="utf-8") == f"requeue {os.getpid()}\n"
    step = torch.load(last, weights_only=True)["global_step"]
    done = subprocess.run(
        [*command[:-1], f"--trainer.max_steps={step + 3}"], cwd=tmp_path, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0
    assert torch.load(last, weights_only=True)["global_step"] == step + 3
    assert (tmp_path / "requeued").read_text(encoding="utf-8").count("requeue") == 1


@pytest.mark.slow
def test_torchrun_restarts_with_the_same_command(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "-m", "linvit"]
    options = flags(trainer__devices=2, trainer__strategy="ddp", resume="auto")
    done = subprocess.run(
        [*torchrun, "fit", f"--config={QUICKSTART}", *tiny(), *options, f"--trainer.callbacks+={__name__}.FailOnce"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "resumes from last.ckpt, step 10" in done.stderr
    (last,) = tmp_path.rglob("last.ckpt")
    assert torch.load(last, weights_only=True)["global_step"] == 20
