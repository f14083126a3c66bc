"""Runs cells as an array of SLURM jobs by submitit; the machines share the folder of the experiment."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linvit.errors import UserError
from linvit.experiments.compare.cells import Cell
from linvit.experiments.compare.process import CellJob
from linvit.signals import STOP

POLL = 2.0  # seconds
SIGNAL = "USR1"  # before the end of a job; it reaches the cell, too, which saves at it. submitit's USR2 would kill it
BEFORE = 120  # seconds
TIMEOUTS = 1000  # a cell goes on in another job when its time is over


@dataclass(frozen=True)
class Demands:
    """What each cell asks SLURM for.

    Attributes:
        minutes: Of one job; a cell that is not finished by then saves, and its job is queued again.
        partition: Name, or None for the cluster's default.
        cpus: Processors, and threads.
        gpus: Devices.
        jobs: Cells at a time, at most.
    """

    minutes: int
    partition: str | None
    cpus: int
    gpus: int
    jobs: int | None


def run_on_slurm(
    cells: Sequence[Cell], demands: Demands, watch: Callable[[Cell | None], None], cluster: str = "slurm"
) -> bool:
    """Runs cells as an array of jobs, which SLURM starts as it sees fit.

    At a signal all are cancelled: those that run save.

    Args:
        cells: In the order in which they are submitted.
        demands: What each asks for.
        watch: Called with each cell that has ended, and with None in between.
        cluster: Executor of submitit.

    Returns:
        Whether all have been run; otherwise `STOP.received` is the signal that ended them.

    Raises:
        UserError: If submitit is not installed, or SLURM is not there or refuses the jobs.
    """
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = SIGNAL  # which jobs read
    try:
        import submitit
    except ImportError as error:
        raise UserError("--engine=slurm needs the package 'submitit': pip install 'linvit[slurm]'") from error
    root = cells[0].root
    try:
        executor = submitit.AutoExecutor(root / "slurm", cluster, slurm_max_num_timeout=TIMEOUTS)
        executor.update_parameters(
            name=f"linvit-{root.name}", timeout_min=demands.minutes, cpus_per_task=demands.cpus, tasks_per_node=1,
            gpus_per_node=demands.gpus or None, slurm_partition=demands.partition,
            slurm_array_parallelism=demands.jobs,
            slurm_additional_parameters={"signal": f"{SIGNAL}@{BEFORE}"},
        )  # fmt: skip
        # one task, which starts the processes of a cell's devices itself: Lightning must not take it for all of them
        environment = {"OMP_NUM_THREADS": str(demands.cpus), "SLURM_JOB_NAME": "interactive"}
        commands, logs = [cell.command for cell in cells], [str(cell.log) for cell in cells]
        jobs = executor.map_array(CellJob(), commands, logs, [environment] * len(cells))
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"SLURM does not take the jobs: {error}") from error
    running = dict(zip(cells, jobs, strict=True))
    told = False
    while running:
        for cell, job in [(cell, job) for cell, job in running.items() if job.done()]:
            del running[cell]
            failure = job.exception()
            if failure is not None:
                with cell.log.open("a", encoding="utf-8") as log:
                    print(f"linvit: error: SLURM ended job {job.job_id}: {job.state}", file=log)
            cell.ended(*(job.result() if failure is None else (1, 0.0)))
            watch(cell)
        watch(None)
        time.sleep(POLL if running else 0)
        if STOP.received is not None and not told:
            told = True
            for job in running.values():
                job.cancel(check=False)
    return STOP.received is None
