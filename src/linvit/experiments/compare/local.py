"""Runs cells on this machine, several at a time."""

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from linvit import machine
from linvit.experiments.compare.cells import Cell
from linvit.experiments.compare.process import start
from linvit.signals import STOP

POLL = 0.2  # seconds

Environment = Mapping[str, str]
"""Variables that a cell's process gets: its threads, and the devices that it sees."""


def run_here(cells: Sequence[Cell], slots: Sequence[Environment], watch: Callable[[Cell | None], None]) -> bool:
    """Runs cells, as many at a time as there are slots; one that dies does not stop the others.

    At a signal all running cells are told to save and to end.

    Args:
        cells: In the order in which they start.
        slots: What the cells of each slot are given.
        watch: Called with each cell that has ended, and with None in between.

    Returns:
        Whether all have been run; otherwise `STOP.received` is the signal that ended them.
    """
    waiting = list(cells)
    running: dict[int, _Process] = {}
    while running or (waiting and STOP.received is None):
        if STOP.received is None:
            for number in [number for number in range(len(slots)) if number not in running][: len(waiting)]:
                running[number] = _Process(waiting.pop(0), slots[number])
        for process in running.values():
            if STOP.received is not None:
                process.tell()
        for number, process in list(running.items()):
            if process.ended():
                del running[number]
                watch(process.cell)
        watch(None)
        time.sleep(POLL)
    return STOP.received is None


def slots(jobs: int, devices: Sequence[str], per_cell: int) -> list[Environment]:
    """What cells that run at a time are given: a share of the threads, and their devices.

    Args:
        jobs: Cells at a time.
        devices: CUDA devices, as `CUDA_VISIBLE_DEVICES` names them; none on a CPU.
        per_cell: Devices of each cell; if there are fewer than all cells need, cells share them.
    """
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, int(machine.cpus() / jobs))))}
    groups = [devices[start : start + per_cell] for start in range(0, len(devices) - per_cell + 1, per_cell)]
    if not groups:
        return [threads] * jobs
    return [{**threads, "CUDA_VISIBLE_DEVICES": ",".join(groups[job % len(groups)])} for job in range(jobs)]


class _Process:
    """The process of a cell."""

    def __init__(self, cell: Cell, environment: Environment) -> None:
        self.cell, self._start, self._told = cell, time.monotonic(), False
        self._process = start(cell.command, str(cell.log), environment)
        STOP.children.append(self._process)

    def tell(self) -> None:
        """Tells it to save and to end, once."""
        if not self._told:
            self._told = True
            self._process.send_signal(signal.SIGTERM)

    def ended(self) -> bool:
        """Whether it has ended; how is written down."""
        code = self._process.poll()
        if code is not None:
            self._process.communicate()  # closes its pipe
            self.cell.ended(code, time.monotonic() - self._start)
        return code is not None
