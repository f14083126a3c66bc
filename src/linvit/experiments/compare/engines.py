"""Starts runs: processes of this machine, tasks of Ray, or jobs of SLURM, whose machines share their folder."""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from linvit.errors import UserError
from linvit.experiments.compare.experiment import SweepRun
from linvit.experiments.compare.process import ProcessJob, start, stop
from linvit.io import machine
from linvit.io.signals import STOP

POLL = 0.2  # seconds
SIGNAL = "USR1"  # before the end of a SLURM job; it also reaches the run, which saves. submitit's USR2 would kill it
BEFORE = 120  # seconds
TIMEOUTS = 1000  # a run resumes in another job when its time is over

Environment = Mapping[str, str]
"""Variables that a run's process gets: its threads, and the devices that it sees."""


class Job(Protocol):
    """A run submitted to an engine; submitit's jobs have this interface."""

    def done(self) -> bool:
        """Returns True if it has ended, or will not start."""

    def result(self) -> tuple[int, float] | None:
        """Returns exit code and seconds; None if not started. Raises if the engine has ended it."""

    def cancel(self) -> None:
        """Lets it save and end, or not start at all."""


def say_how_it_ended(runs: Sequence[SweepRun], run: SweepRun) -> None:
    """Prints the outcome of a run, and the number of finished runs."""
    how, begun = f"{run.state} after {timedelta(seconds=round(run.seconds))}", run.newest
    score = begun.score(begun.score_tag()) if begun is not None else None
    if run.state == "failed":
        how += f": {run.last_words()} ({run.log})"
    elif begun is not None and score is not None:
        how += f", {begun.score_tag()} {score.value:.4f} of epoch {score.epoch}"
    print(f"{run.name} {how}; {sum(one.state == 'finished' for one in runs)} of {len(runs)} runs", flush=True)


def run_jobs(jobs: Mapping[SweepRun, Job]) -> Iterator[SweepRun]:
    """Waits for runs, records the outcome of each, and yields it; a signal cancels the remaining ones."""
    running, cancelled = dict(jobs), False
    while running:
        if STOP.received is not None and not cancelled:
            cancelled = True
            for job in running.values():
                with suppress(subprocess.SubprocessError):  # scancel fails for a job that has ended meanwhile
                    job.cancel()
        for run in [run for run, job in running.items() if job.done()]:
            try:
                outcome = running.pop(run).result()
            except Exception as error:  # cancelled before it started, or its machine is gone
                with run.log.open("a", encoding="utf-8") as log:
                    print(f"linvit: error: it was ended: {type(error).__name__}", file=log)
                outcome = 1, 0.0
            if outcome is not None:
                run.ended(*outcome)
                yield run
        time.sleep(POLL if running else 0)


class _LocalJob:
    """A process of this machine, which starts when one of the slots is free."""

    def __init__(self, run: SweepRun, slots: list[Environment]) -> None:
        self._run, self._slots, self._cancelled, self._told = run, slots, False, False
        self._process: subprocess.Popen[bytes] | None = None
        self._outcome: tuple[int, float] | None = None

    def done(self) -> bool:
        if self._process is None:
            busy = bool(self._slots) and self._run.busy
            if busy and not self._told:
                self._told = True
                print(f"{self._run.name} waits for the process that a killed command has left", flush=True)
            if self._slots and not self._cancelled and not busy:
                self._run.check_folder()
                self._slot, self._begun = self._slots.pop(0), time.monotonic()
                self._process = start(self._run.command, str(self._run.log), self._slot)
                STOP.children.append(self._process)
            return self._cancelled
        code = self._process.poll()
        if code is None:
            return False
        self._outcome = code, time.monotonic() - self._begun
        self._slots.append(self._slot)
        return True

    def result(self) -> tuple[int, float] | None:
        if self._process is not None:
            self._process.communicate()  # closes its pipe
        return self._outcome

    def cancel(self) -> None:
        self._cancelled = True
        if self._process is not None:
            stop(self._process)


def run_here(runs: Sequence[SweepRun], slots: Sequence[Environment]) -> Iterator[SweepRun]:
    """Starts runs on this machine, in their order, as many at a time as there are slots; see `run_jobs`."""
    free = [*slots]
    return run_jobs({run: _LocalJob(run, free) for run in runs})


def slots(jobs: int, devices: Sequence[str], per_run: int) -> list[Environment]:
    """Returns the environments of concurrent runs: shares of threads, CUDA devices (shared if there are too few)."""
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, int(machine.cpus() / jobs))))}
    groups = [devices[start : start + per_run] for start in range(0, len(devices) - per_run + 1, per_run)]
    if not groups:
        return [threads] * jobs
    return [{**threads, "CUDA_VISIBLE_DEVICES": ",".join(groups[job % len(groups)])} for job in range(jobs)]


class _RayJob(NamedTuple):
    ray: Any
    reference: Any

    def done(self) -> bool:
        return bool(self.ray.wait([self.reference], timeout=0)[0])

    def result(self) -> tuple[int, float]:
        outcome: tuple[int, float] = self.ray.get(self.reference)
        return outcome

    def cancel(self) -> None:
        self.ray.cancel(self.reference)


def run_on_ray(runs: Sequence[SweepRun], address: str | None, cpus: int, gpus: int) -> Iterator[SweepRun]:
    """Starts runs as tasks of Ray, which decides where and how many at a time; None starts Ray on this machine."""
    try:
        import ray
    except ImportError as error:
        raise UserError("--engine=ray needs the package 'ray': pip install 'linvit[ray]'") from error
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError) as error:
        raise UserError(f"there is no Ray cluster at --address={address}: {error}") from error
    try:
        gpus = gpus if ray.cluster_resources().get("GPU") else 0
        task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(lambda *given: ProcessJob()(*given))
        threads = {"OMP_NUM_THREADS": str(cpus)}
        yield from run_jobs({run: _RayJob(ray, task.remote(run.command, str(run.log), threads)) for run in runs})
    finally:
        ray.shutdown()


def run_on_slurm(
    runs: Sequence[SweepRun], cluster: str = "slurm", cpus_per_task: int = 1, **demands: Any
) -> Iterator[SweepRun]:
    """Starts runs as an array of jobs by submitit, with the executor `cluster` and its parameters `demands`.

    A run that is not finished within `timeout_min` saves, and its job is queued again.
    """
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = SIGNAL  # which jobs read
    try:
        import submitit
    except ImportError as error:
        raise UserError("--engine=slurm needs the package 'submitit': pip install 'linvit[slurm]'") from error
    root = runs[0].folder.parent
    try:
        executor = submitit.AutoExecutor(root / "slurm", cluster, slurm_max_num_timeout=TIMEOUTS)
        executor.update_parameters(
            name=f"linvit-{root.name}", tasks_per_node=1, cpus_per_task=cpus_per_task,
            slurm_additional_parameters={"signal": f"{SIGNAL}@{BEFORE}"}, **demands,
        )  # fmt: skip
        # one task, which starts the processes of a run's devices itself: Lightning must not take it for all of them
        environment = {"OMP_NUM_THREADS": str(cpus_per_task), "SLURM_JOB_NAME": "interactive"}
        commands, logs = [run.command for run in runs], [str(run.log) for run in runs]
        jobs: list[Any] = executor.map_array(ProcessJob(), commands, logs, [environment] * len(runs))
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"SLURM does not take the jobs: {error}") from error
    return run_jobs(dict(zip(runs, jobs, strict=True)))
