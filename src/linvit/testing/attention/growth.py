"""How work and time grow with the number of tokens."""

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linvit.attention.base import Attention, Grid
from linvit.testing.attention.cost import operations
from linvit.testing.attention.inputs import Inputs, Subject, inputs, normal
from linvit.testing.report import Finding, Verdict, at, failed, not_declared, passed, refusable

SIDES = (28, 56)  # N = 784, 3136
LARGE_SIDE = 112  # N = 12544
COUNTED = {"O(N)": 1.25, "O(N^2)": 2.25}
"""Largest exponents of the counts. Counts are exact, and constant parts only lower the exponent; N log N would be 0.14
above N, and a kernel that grows with the nominal grid adds 0.2."""
ROUNDS = 3
LEAST_SECONDS = 0.01  # one measurement; the clock of a process ticks in microseconds


@refusable
def growth_of_work(subject: Subject) -> Finding:
    """Checks that bytes written in a training step, its largest tensor, and operations grow as declared.

    Each size has an instance of its own, as in a host: parameters and landmarks may depend on the nominal grid.
    """
    counts: dict[str, list[int]] = {"bytes written": [], "largest tensor": [], "operations": []}
    tokens = []
    for side in SIDES:
        grid = Grid((side, side))
        with at(f"N={side * side}"):
            mechanism = subject.build(grid, torch.float32)
            given = inputs(mechanism, grid, batch=1, dtype=torch.float32)
            written = _written(mechanism.train(), given, grid)
            counts["bytes written"].append(written.total)
            counts["largest tensor"].append(written.largest)
            counts["operations"].append(operations(mechanism.eval(), given, grid).total)
        tokens.append(side * side)
    exponents = {name: exponent(tokens, values) for name, values in counts.items() if all(values)}
    said = ", ".join(f"{name} ~ N^{power:.2f}" for name, power in exponents.items())
    said += f"; the largest has {written.largest / 2**20:.1f} MiB at N={tokens[-1]}"
    complexity = mechanism.complexity
    if complexity is None:
        return not_declared(f"complexity is None; {said}")
    power, said = max(exponents.values(), default=0), f"declared {complexity}; {said}"
    if power > COUNTED[complexity]:
        return failed(f"{said}; at most N^{COUNTED[complexity]:.2f}")
    if complexity != "O(N)" and power <= COUNTED["O(N)"]:
        return failed(f"{said}; that is linear, so declare complexity = 'O(N)'")
    return passed(said)


@refusable
def growth_of_time(subject: Subject) -> Finding:
    """Measures the processor time of a forward pass on one thread. Other work on the machine changes it.

    The largest size is left to mechanisms that claim O(N): N^2 numbers take gigabytes there.
    """
    large = not subject.quick and subject.build().complexity == "O(N)"
    runs = dict(_forward(subject, side) for side in ((*SIDES, LARGE_SIDE) if large else SIDES))
    best = _least_seconds(runs)
    times = ", ".join(f"{seconds * 1e3:.2g} ms at N={tokens}" for tokens, seconds in best.items())
    return Finding(Verdict.MEASURED, f"time ~ N^{exponent(list(best), list(best.values())):.2f}: {times}")


def exponent(sizes: list[int], values: list[float] | list[int]) -> float:
    """Returns the power of the size by which the values grow: the slope of a line through the logarithms."""
    x, y = ([math.log(value) for value in numbers] for numbers in (sizes, values))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - mean_x) ** 2 for a in x)


class Written(TorchDispatchMode):
    """Counts the bytes of every tensor that an operation allocates; views count nothing.

    Attributes:
        total: Bytes of all of them.
        largest: Bytes of the largest.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {_storage(tensor).data_ptr() for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            if _storage(tensor).data_ptr() not in given:
                self.total += _storage(tensor).nbytes()
                self.largest = max(self.largest, _storage(tensor).nbytes())
        return out


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(mechanism: Attention, given: Inputs, grid: Grid) -> Written:
    """Counts the tensors of one forward and backward pass."""
    given = given.map(lambda x: x.detach().requires_grad_())
    sources = [*given.named.values(), *(p for p in mechanism.parameters() if p.requires_grad)]
    written = Written()
    with written:
        out = given(mechanism, grid)
        torch.autograd.grad(out, sources, normal(*out.shape, seed=9).to(out.dtype), allow_unused=True)
    return written


def _forward(subject: Subject, side: int) -> tuple[int, Callable[[], Tensor]]:
    """Returns N, and a function that runs a forward pass on one image of N tokens."""
    grid = Grid((side, side))
    mechanism = subject.build(grid, torch.float32)
    given = inputs(mechanism, grid, batch=1, dtype=torch.float32)
    return side * side, lambda: given(mechanism, grid)


@torch.no_grad()
def _least_seconds(runs: dict[int, Callable[[], Tensor]]) -> dict[int, float]:
    """Measures the least processor seconds of each on one thread, in turn: noise only ever adds time."""
    best = dict.fromkeys(runs, math.inf)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(ROUNDS):
            best = {tokens: min(best[tokens], _seconds(run)) for tokens, run in runs.items()}
    finally:
        torch.set_num_threads(threads)
    return best


def _seconds(run: Callable[[], Tensor]) -> float:
    """Measures the processor seconds of one call, averaged over as many calls as take long enough."""
    run()  # warm
    calls, start = 0, time.process_time()
    while (spent := time.process_time() - start) < LEAST_SECONDS:
        run()
        calls += 1
    return spent / calls
