"""Time and memory of attention and of whole models in training: against the authors' code, compiled against eager.

- `--authors`: `AttentionLayer` with focused attention against `FocusedLinearAttention` as FLatten's authors compute it,
  forward and forward + backward, eager and compiled, at three shapes.
- `--mechanisms`: every mechanism compiled against eager.
- `--models`: whole models at 224 pixels against those of their authors (`authors/`), with the same weights: a forward
  pass, and a step of training (cross entropy, AdamW), eager, and with `--compiled` compiled, which takes minutes.
- `--precision`: errors of every mechanism against float64, output / gradients, with products in TF32 and bfloat16.
- `--memory`: MiB that every mechanism's layer keeps for backward, in float32 and under bfloat16 autocast.

Times are medians of runs in turns, so that whatever else the machine does meets all of them; each ratio is given for
wall time and for processor time. Without an argument: all of these.

Example:
    $ python benchmarks/lean.py --models --names flatten_swin_tiny soft_tiny --rounds 5
"""

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import low_precision
import torch
from authors import MODELS
from authors.focused import Focused
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit.analysis.kept_for_backward import kept_for_backward
from linvit.cli.training.memory import keep_memory

SHAPES = [(4, 3136, 96, 3), (16, 784, 192, 6), (32, 196, 192, 3)]  # batch, tokens, channels, heads


class Ours(nn.Module):
    """Our layer at one grid."""

    def __init__(self, dim: int, size: tuple[int, int], heads: int, attention: str) -> None:
        super().__init__()
        self.grid = linvit.Grid(size)
        self.layer = linvit.AttentionLayer(dim, heads, self.grid, attention=attention)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        out: Tensor = self.layer(x, self.grid)
        return out


Pass = Callable[[], object]


def passes(module: nn.Module, x: Tensor) -> dict[str, Pass]:
    """A forward pass without gradients, and a forward and a backward pass."""

    def forward() -> None:
        with torch.no_grad():
            module(x)

    def both() -> None:
        module(x).sum().backward()
        module.zero_grad()
        x.grad = None

    return {"forward": forward, "forward + backward": both}


def in_turns(works: Sequence[Pass], rounds: int) -> list[tuple[float, float]]:
    """Median seconds of each, of wall time and of processor time."""
    samples: list[list[tuple[float, float]]] = [[] for _ in works]
    for turn in range(rounds + 2):
        for work, kept in zip(works, samples, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            if turn >= 2:  # warm
                kept.append((time.perf_counter() - wall, time.process_time() - cpu))
    return [(statistics.median(w for w, _ in kept), statistics.median(c for _, c in kept)) for kept in samples]


def ratio(over: tuple[float, float], under: tuple[float, float]) -> str:
    """Two medians over two others: of wall time, and of processor time in brackets."""
    return f"{over[0] / under[0]:.2f} ({over[1] / under[1]:.2f})"


def table(*columns: str) -> None:
    """Prints the head of a Markdown table."""
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)


def authors(rounds: int) -> None:
    """Ours against the authors' focused attention."""
    table(
        "B, N, C, heads", "pass", "eager, ours / theirs", "compiled, ours / theirs", "ours, compiled / eager", "ours ms"
    )
    for batch, tokens, dim, heads in SHAPES:
        torch.compiler.reset()
        size = (math.isqrt(tokens),) * 2
        x = torch.randn(batch, tokens, dim, requires_grad=True)
        modules = [Focused(dim, size, heads), Ours(dim, size, heads, "focused")]
        modules += [torch.compile(module, fullgraph=True) for module in modules]
        works = [passes(module, x) for module in modules]
        for name in works[0]:
            theirs, ours, theirs_compiled, ours_compiled = in_turns([work[name] for work in works], rounds)
            row = ratio(ours, theirs), ratio(ours_compiled, theirs_compiled), ratio(ours_compiled, ours)
            shape = ", ".join(map(str, (batch, tokens, dim, heads)))
            print(f"| {shape} | {name} | {' | '.join(row)} | {ours[0] * 1e3:.1f} |", flush=True)


def mechanisms(rounds: int, names: Sequence[str]) -> None:
    """Every mechanism compiled against eager at the first shape."""
    batch, tokens, dim, heads = SHAPES[0]
    table("attention", *(f"{name}, compiled / eager" for name in ("forward", "forward + backward")), "eager ms")
    x = torch.randn(batch, tokens, dim, requires_grad=True)
    for attention in names:
        torch.compiler.reset()
        module = Ours(dim, (math.isqrt(tokens),) * 2, heads, attention)
        eager, compiled = passes(module, x), passes(torch.compile(module, fullgraph=True), x)
        times = {name: in_turns([compiled[name], eager[name]], rounds) for name in eager}
        row = " | ".join(ratio(*pair) for pair in times.values())
        milliseconds = ", ".join(f"{pair[1][0] * 1e3:.1f}" for pair in times.values())
        print(f"| {attention} | {row} | {milliseconds} |", flush=True)


def steps(model: nn.Module, images: Tensor, classes: Tensor) -> dict[str, Pass]:
    """A forward pass without gradients, and a step of training."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def forward() -> None:
        model.eval()
        with torch.no_grad():
            model(images)

    def step() -> None:
        model.train()
        F.cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"forward": forward, "training step": step}


def models(rounds: int, names: Sequence[str], batch: int, compiled: bool) -> None:
    """Whole models against their authors'."""
    table("model", "pass", "eager, ours / theirs", "ours, s", *["compiled, ours / theirs"] * compiled)
    for name in names:
        torch.compiler.reset()
        theirs, ours = MODELS[name](), linvit.create_backbone(name)
        linvit.load_pretrained(ours, theirs.state_dict())
        images, classes = torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))
        with torch.no_grad():
            torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=1e-3, atol=1e-4)
        both = [theirs, ours, *([torch.compile(theirs), torch.compile(ours)] if compiled else [])]
        works = [steps(model, images, classes) for model in both]
        for kind in works[0]:
            times = in_turns([work[kind] for work in works], rounds)
            row = [ratio(times[1], times[0]), f"{times[1][0]:.2f}", *([ratio(times[3], times[2])] if compiled else [])]
            print(f"| {name} | {kind} | {' | '.join(row)} |", flush=True)


def memory(names: Sequence[str], compiled: bool) -> None:
    """MiB kept for backward by a layer at the first shape."""
    batch, tokens, dim, heads = SHAPES[0]
    size = (math.isqrt(tokens),) * 2
    x = torch.randn(batch, tokens, dim, requires_grad=True)
    makers: dict[str, Callable[[], nn.Module]] = {name: partial(Ours, dim, size, heads, name) for name in names}
    makers["the authors' focused"] = partial(Focused, dim, size, heads)
    table(
        "attention",
        *(
            f"{precision}{mode}"
            for mode in ("", ", compiled")[: 1 + compiled]
            for precision in ("float32", "bfloat16 autocast")
        ),
    )
    for name, make in makers.items():
        module = make()
        row = []
        for run in (module, torch.compile(module, fullgraph=True))[: 1 + compiled]:
            torch.compiler.reset()
            for autocast in (False, True):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    run(x)  # what is made but once does not count
                    row.append(f"{kept_for_backward(partial(run, x), module) / 2**20:.1f}")
        print(f"| {name} | {' | '.join(row)} |", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in ("authors", "mechanisms", "models", "memory", "precision"):
        parser.add_argument(f"--{part}", action="store_true", help="this table")
    parser.add_argument(
        "--compiled", action="store_true", help="memory of compiled layers and time of compiled models, too"
    )
    parser.add_argument("--names", nargs="*", help="mechanisms, or models with --models; default: all")
    parser.add_argument("--batch", type=int, default=8, help="images of a model")
    parser.add_argument("--rounds", type=int, default=20, help="measured runs of each")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    given = parser.parse_args()
    every = not (given.authors or given.mechanisms or given.models or given.memory or given.precision)
    attentions = given.names or linvit.list_attentions()
    keep_memory()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {given.threads} thread(s), {given.rounds} runs; in brackets: processor time")
    if hasattr(os, "getloadavg"):
        print(f"{os.cpu_count()} processors, on which {os.getloadavg()[0]:.1f} processes ran in the minute before")
    if every or given.memory:
        memory(attentions, given.compiled)
    if every or given.precision:
        table("attention", "float32", "products in TF32", "TF32 by option", "bfloat16 autocast", "its products, too")
        low_precision.rows(attentions)
    if every or given.authors:
        authors(given.rounds)
    if every or given.mechanisms:
        mechanisms(given.rounds, attentions)
    if every or given.models:
        models(given.rounds, MODELS if every or not given.names else given.names, given.batch, given.compiled)


if __name__ == "__main__":
    main()
