"""Runs cells on a Ray cluster, whose machines share the folder of the experiment."""

from collections.abc import Callable, Sequence

from linvit.errors import UserError
from linvit.experiments.compare.cells import Cell
from linvit.experiments.compare.process import run
from linvit.signals import STOP

POLL = 0.5  # seconds


def run_on_ray(
    cells: Sequence[Cell], address: str | None, cpus: int, gpus: int, watch: Callable[[Cell | None], None]
) -> bool:
    """Runs cells as tasks of Ray, which decides where and how many at a time.

    At a signal those that run are cancelled, which lets them save, and those that wait are not started.

    Args:
        cells: In the order in which they are submitted.
        address: Of the cluster, "auto" for the one that this machine belongs to; None starts Ray on this machine.
        cpus: Processors of each cell, and its threads.
        gpus: Devices of each cell, if the cluster has any.
        watch: Called with each cell that has ended, and with None in between.

    Returns:
        Whether all have been run; otherwise `STOP.received` is the signal that ended them.

    Raises:
        UserError: If Ray is not installed, or the cluster cannot be reached.
    """
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
        task = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(run)
        threads = {"OMP_NUM_THREADS": str(cpus)}
        running = {task.remote(cell.command, str(cell.log), threads): cell for cell in cells}
        told = False
        while running:
            ended, _ = ray.wait(list(running), timeout=POLL)
            for reference in ended:
                cell = running.pop(reference)
                try:
                    cell.ended(*ray.get(reference))
                except ray.exceptions.RayError as error:  # cancelled before it started, or its machine is gone
                    with cell.log.open("a", encoding="utf-8") as log:
                        print(f"linvit: error: Ray ended it: {type(error).__name__}", file=log)
                    cell.ended(1, 0.0)
                watch(cell)
            watch(None)
            if STOP.received is not None and not told:
                told = True
                for reference in running:
                    ray.cancel(reference)
    finally:
        ray.shutdown()
    return STOP.received is None
