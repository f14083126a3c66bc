"""What a mechanism computes, allocates and keeps, and how that grows with the number of tokens."""

import math
from functools import partial

import torch

from linvit.analysis.operations import Operations, count_operations, kept_for_backward
from linvit.attention.base import Attention, Grid
from linvit.testing.attention.inputs import NOMINAL, AttentionSubject, Inputs, inputs
from linvit.testing.report import Line, Verdict, at, failed, not_declared, passed, refusable
from linvit.testing.subject import sized

FEW = 3
"""Times its inputs that a mechanism may keep without advice: a copy of them in float32 under autocast."""
SIDES = (28, 56)  # N = 784, 3136
COUNTED = {"O(N)": 1.25, "O(N^2)": 2.25}
"""Largest exponents of the counts. Counts are exact, and constant parts only lower the exponent; N log N would be 0.14
above N, and a kernel that grows with the nominal grid adds 0.2."""


def cost(subject: AttentionSubject) -> Line:
    """Counts the operations of one image, and measures what is kept for backward as a multiple of the inputs."""
    mechanism = subject.build(dtype=torch.float32)
    counted = _operations(mechanism, inputs(mechanism, NOMINAL, batch=1, dtype=torch.float32))
    said = [
        f"{counted.matmul} matmul MACs, {counted.elementwise} elementwise operations, {counted.parameters} parameters"
    ]
    for autocast, name in ((False, "float32"), (True, "bfloat16 autocast")):
        dtype = torch.bfloat16 if autocast else torch.float32
        given = inputs(mechanism, NOMINAL, batch=1, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            bytes_kept = _kept(mechanism, given)
        times = bytes_kept / sum(tensor.nbytes for tensor in given.named.values())
        said.append(f"keeps {bytes_kept / 2**10:.0f} KiB in {name}, {times:.1f} times its inputs")
    hint = "" if times <= FEW else "; @linvit.recomputed above @linvit.full_precision keeps the inputs alone"
    return Line("", Verdict.MEASURED, f"{'; '.join(said)} at {sized(NOMINAL)}{hint}")


@refusable
def growth_of_work(subject: AttentionSubject) -> Line:
    """Checks that operations, and bytes kept for backward, grow as declared.

    Each size has an instance of its own, as in a host: parameters and landmarks may depend on the nominal grid.
    """
    counts: dict[str, list[int]] = {"bytes kept for backward": [], "operations": []}
    for side in SIDES:
        grid = Grid((side, side))
        with at(f"N={side * side}"):
            mechanism = subject.build(grid, torch.float32)
            given = inputs(mechanism, grid, batch=1, dtype=torch.float32)
            operations = _operations(mechanism, given).total
            kept = _kept(mechanism.train(), given)
        for found, count in zip(counts.values(), (kept, operations), strict=True):
            found.append(count)
    grown = (SIDES[1] / SIDES[0]) ** 2
    exponents = {name: math.log(large / few, grown) for name, (few, large) in counts.items() if few and large}
    said = ", ".join(f"{name} ~ N^{power:.2f}" for name, power in exponents.items())
    complexity = mechanism.complexity
    if complexity is None:
        return not_declared(f"complexity is None; {said}")
    power, said = max(exponents.values(), default=0), f"declared {complexity}; {said}"
    if power > COUNTED[complexity]:
        return failed(f"{said}; at most N^{COUNTED[complexity]:.2f}")
    if complexity != "O(N)" and power <= COUNTED["O(N)"]:
        return failed(f"{said}; that is linear, so declare complexity = 'O(N)'")
    return passed(said)


def _operations(mechanism: Attention, given: Inputs) -> Operations:
    arguments, extra = given.arguments
    return count_operations(mechanism, *arguments, **extra)


def _kept(mechanism: Attention, given: Inputs) -> int:
    return kept_for_backward(partial(given.map(lambda x: x.requires_grad_()), mechanism), mechanism)
