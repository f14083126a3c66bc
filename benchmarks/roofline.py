"""How long GPUs need at least for a module's operators, by their data sheets: a prediction, not a measurement.

An operator takes at least as long as the bytes that it reads and writes, or the floating-point operations of its
products, at the peak of the GPU (Williams et al. 2009, "Roofline"). What starting it costs the host is left out. On a
machine with a GPU, in bfloat16:

    python benchmarks/roofline.py linear focused --grids 28,56 --layer
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linvit.analysis.operations import flop_counter
from linvit.attention.kernels.choice import set_attention_kernel
from linvit.cli.bench.costs import parse_sizes
from linvit.experiments.bench import builders
from linvit.experiments.bench.runner import Build, Mode, Runner, Settings
from linvit.io.terminal import table


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
PREDICTION = (
    "Forward + backward by torch's operators, for most of which it launches one kernel. GB: of the tensors that they "
    "read and write. GFLOP: of products. ms on a GPU are PREDICTED, not measured: what these take at least at the "
    "peaks of its data sheet in bfloat16, without what starting an operator costs:",
    *(
        f"{name}: {gpu.flops / 1e12:g} TFLOP/s, {gpu.bandwidth / 1e12:g} TB/s ({gpu.source})"
        for name, gpu in GPUS.items()
    ),
)
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
        super().__init__()
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


def count(builders: Mapping[str, Build], grids: Sequence[tuple[int, int]], settings: Settings) -> list[list[str]]:
    """Counts the operators of mechanisms and of torch's SDPA, forward + backward, and predicts their least times.

    A GPU chooses other operators than a CPU, so it must be there.
    """
    rows = [["", "tokens", "operators", "GB", "GFLOP", *(f"{name} ms" for name in GPUS)]]
    mode: Mode = "no recompute" if "no recompute" in settings.modes else "eager"
    for name, build in builders.items():
        for grid in grids if name != "naive softmax" else ():
            runner = Runner(*build(grid), settings, mode)
            set_attention_kernel(runner.trained, "torch")  # whose operators can be counted
            runner.forward_backward()
            with Operators() as there:
                out = runner.training_forward()
            with Operators() as back:
                out.backward(runner.gradient)
            both = there.called, back.called
            figures = [[sum(one.bytes for one in own) / 1e9 for own in both]]
            figures.append([sum(one.flops for one in own) / 1e9 for own in both])
            figures += [[1e3 * least_seconds(own, gpu) for own in both] for gpu in GPUS.values()]
            counts = " + ".join(str(len(own)) for own in both)
            rows.append([name, f"{grid[0] * grid[1]:,}", counts, *(f"{a:.3g} + {b:.3g}" for a, b in figures)])
    return rows


def main(argv: list[str] | None = None) -> int:
    """Prints operators, bytes, FLOPs and least times of mechanisms in their layer or alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="attentions, names or package.module:Class")
    parser.add_argument("--grids", default="56", help="patch grids, a side or HxW, with commas (%(default)s)")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dim", type=int, default=96)
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--layer", action="store_true", help="with the projections of the layer around it")
    parser.add_argument("--no_recompute", action="store_true")
    args = parser.parse_args(argv)
    modes = ("eager", "no recompute") if args.no_recompute else ("eager",)
    settings = Settings("cuda", torch.bfloat16, modes=modes, batch=args.batch)
    build = builders.layer if args.layer else builders.mechanism
    specs = {name: name for name in args.names} | {"torch's SDPA": builders.BASELINES["torch's SDPA"]}
    modules = {name: partial(build, spec, args.dim, args.heads, settings) for name, spec in specs.items()}
    print("\n".join([*PREDICTION, "", *table(count(modules, parse_sizes("--grids", args.grids), settings))]))
    return 0


if __name__ == "__main__":
    main()
