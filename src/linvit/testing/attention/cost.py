"""How what a mechanism computes and keeps grows with the number of tokens."""

import math
from functools import partial

import torch

from linvit.analysis.operations import count_operations, kept_for_backward
from linvit.attention.base import Grid
from linvit.testing.attention.inputs import AttentionSubject, inputs
from linvit.testing.report import Line, at, failed, not_declared, passed, refusable

SIDES = (28, 56)  # N = 784, 3136
COUNTED = {"O(N)": 1.25, "O(N log N)": 1.4, "O(N^1.5)": 1.75, "O(N^2)": 2.25}
"""Largest exponents of the counts. Counts are exact, and constant parts only lower the exponent; N log N would be 0.14
above N, which can hardly be told from it, and a kernel that grows with the nominal grid adds 0.2."""


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
            arguments, extra = given.arguments
            operations = count_operations(mechanism, *arguments, **extra).total
            kept = kept_for_backward(partial(given.map(lambda x: x.requires_grad_()), mechanism.train()), mechanism)
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
    if complexity not in ("O(N)", "O(N log N)") and power <= COUNTED["O(N)"]:
        return failed(f"{said}; that is linear, so declare complexity = 'O(N)'")
    return passed(said)
