"""Whether the memory of a CPU suffices for a pass: on a GPU the allocator says so itself."""

from collections.abc import Mapping

import torch

from linvit import machine
from linvit.errors import UserError
from linvit.experiments.bench.runner import Candidate, Mode, Runner, Settings
from linvit.experiments.measure import peak_memory

GIB = 2**30
SHARE = 0.8  # of the free memory that a pass may take


def check_memory(name: str, known: Mapping[int, int], candidate: Candidate, settings: Settings) -> None:
    """Raises a `MemoryError` if a pass would take more of the CPU's memory than is free: the system might end linvit.

    Args:
        name: The method of `Runner`.
        known: Peak memory of the pass at smaller sizes; if there are not two of them, still smaller ones are tried.
        candidate: Which is to run.
        settings: How it is to run.
    """
    if torch.device(settings.device).type != "cpu":
        return
    if len(known) < 2:
        known = {**_probe(name, candidate, settings), **known}
    check_free(foretold(known, candidate.amount))


def check_free(needed: float) -> None:
    """Raises a `MemoryError` unless so many bytes are at most 80 % of what is free; where that is unknown, never."""
    memory = machine.memory()
    if memory is not None and needed > SHARE * memory[1]:
        raise MemoryError(f"needs about {needed / GIB:,.1f} GiB, and {memory[1] / GIB:,.1f} GiB are free")


def _probe(name: str, candidate: Candidate, settings: Settings) -> dict[int, int]:
    """Peak memory at half and at a quarter of the sides, where the module takes these."""
    found = {}
    mode: Mode = "eager" if candidate.mode == "compiled" else candidate.mode  # compiling takes long
    for part in (4, 2):
        height, width = (side // part for side in candidate.size)
        try:
            runner = Runner(*candidate.build((height, width)), settings, mode)
            work = getattr(runner, name)
            work()
            found[height * width] = peak_memory(work)
        except (UserError, RuntimeError, ValueError, ZeroDivisionError):
            continue
    return found


def foretold(known: Mapping[int, int], amount: int) -> float:
    """The peak memory at a size by `a N + b N^2` through the largest two of smaller sizes; 0 if there are not two."""
    if len(known) < 2:
        return 0.0
    (n, p), (m, q) = sorted(known.items())[-2:]
    b = max(0.0, (q / m - p / n) / (m - n))
    a = max(0.0, q / m - b * m)
    return a * amount + b * amount**2
