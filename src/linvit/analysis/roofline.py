"""How long GPUs need at least for a module's operators, by their data sheets: a prediction, not a measurement.

An operator takes at least as long as the bytes that it reads and writes, or the floating-point operations of its
products, at the peak of the GPU (Williams et al. 2009, "Roofline"). What starting it costs the host is left out.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linvit.analysis.operations import flop_counter


class Gpu(NamedTuple):
    """Peaks of a GPU: FLOP/s of dense products in bfloat16 with float32 sums, and bytes/s of its memory."""

    flops: float
    bandwidth: float
    source: str


GPUS = {
    "A100": Gpu(312e12, 2.039e12, "NVIDIA A100 data sheet, SXM, 80 GB"),
    "H100": Gpu(989e12, 3.35e12, "NVIDIA H100 data sheet, SXM"),
    "RTX 4090": Gpu(165.2e12, 1.008e12, "NVIDIA Ada GPU architecture whitepaper, App. A"),
}
UNTOUCHED = re.compile(r"_unsafe_view|detach|(new_)?empty(_\w+)?")
OVERWRITING = re.compile(r"(copy|fill|zero)_|(new_)?(full|ones|zeros)(_like)?")
"""Operators that do not read their first tensor."""


class Operator(NamedTuple):
    """An operator that was called: its name, the bytes that it moves, the FLOPs of its products."""

    name: str
    bytes: int
    flops: int


class Operators(TorchDispatchMode):
    """Collects the operators that are called within a block and touch memory; views do not."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: list[Operator] = []
        self._formulas = flop_counter().flop_registry

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        schema = func._schema
        name = schema.name.partition("::")[2]
        written = {given.name for given in schema.arguments if given.is_out}  # and returned
        read = args[1:] if OVERWRITING.fullmatch(name) else args, [v for k, v in kwargs.items() if k not in written]
        tensors = [x for x in tree_leaves((read, out)) if isinstance(x, Tensor)]
        views = any(made.alias_info and not made.alias_info.is_write for made in schema.returns)
        if tensors and not views and not UNTOUCHED.fullmatch(name):
            formula = self._formulas.get(func.overloadpacket)
            flops = 0 if formula is None else formula(*args, **kwargs, out_val=out)
            self.called.append(Operator(name, sum(map(touched, tensors)), flops))
        return out


def touched(x: Tensor) -> int:
    """Bytes of a tensor, with broadcast dimensions once."""
    return x.element_size() * torch.Size([n for n, stride in zip(x.shape, x.stride(), strict=True) if stride]).numel()


def least_seconds(operators: Sequence[Operator], gpu: Gpu) -> float:
    """How long the operators take at least, one after another."""
    return sum(max(one.bytes / gpu.bandwidth, one.flops / gpu.flops) for one in operators)
