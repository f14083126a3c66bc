"""How work grows with the number of tokens."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linvit.attention.base import Attention, Grid
from linvit.testing.attention.cost import operations
from linvit.testing.attention.inputs import AttentionSubject, Inputs, inputs
from linvit.testing.numbers import gradients_of, trainable
from linvit.testing.report import Line, at, failed, not_declared, passed, refusable

SIDES = (28, 56)  # N = 784, 3136
COUNTED = {"O(N)": 1.25, "O(N^2)": 2.25}
"""Largest exponents of the counts. Counts are exact, and constant parts only lower the exponent; N log N would be 0.14
above N, and a kernel that grows with the nominal grid adds 0.2."""


@refusable
def growth_of_work(subject: AttentionSubject) -> Line:
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
            written = _written(mechanism.train(), given)
            counts["bytes written"].append(written.total)
            counts["largest tensor"].append(written.largest)
            counts["operations"].append(operations(mechanism.eval(), given).total)
        tokens.append(side * side)
    exponents = {
        name: math.log(large / few, tokens[1] / tokens[0]) for name, (few, large) in counts.items() if few and large
    }
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


def _written(mechanism: Attention, given: Inputs) -> Written:
    """Counts the tensors of one forward and backward pass."""
    given = given.map(lambda x: x.detach().requires_grad_())
    written = Written()
    with written:
        gradients_of(given(mechanism), given.named | trainable(mechanism))
    return written
