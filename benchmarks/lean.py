"""Time and memory of attention layers in training: against the authors' focused attention, compiled against eager.

- `--authors`: `AttentionLayer` with focused attention against `FocusedLinearAttention` as FLatten's authors compute it,
  forward and forward + backward, eager and compiled, at three shapes.
- `--mechanisms`: every mechanism compiled against eager.
- `--memory`: MiB that every mechanism's layer keeps for backward, in float32 and under bfloat16 autocast.

Times are medians of runs in turns, so that whatever else the machine does meets all of them; each ratio is given for
wall time and for processor time. Without an argument: all three.

Example:
    $ python benchmarks/lean.py --authors --rounds 15
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit.analysis.kept_for_backward import kept_for_backward
from linvit.cli.training.memory import keep_memory

SHAPES = [(4, 3136, 96, 3), (16, 784, 192, 6), (32, 196, 192, 3)]  # batch, tokens, channels, heads


class AuthorsFocused(nn.Module):
    """The steps of FLatten's `FocusedLinearAttention` one after the other, (B, N, C) -> (B, N, C), float32.

    Parameters have the authors' names; `tests/test_benchmarks.py` holds it to the golden files of their code.
    """

    def __init__(self, dim: int, size: tuple[int, int], heads: int, factor: int = 3, kernel: int = 5) -> None:
        super().__init__()
        width = dim // heads
        self.size, self.heads, self.factor = size, heads, factor
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.dwc = nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width)
        self.scale = nn.Parameter(torch.zeros(1, 1, dim))
        self.positional_encoding = nn.Parameter(torch.zeros(1, math.prod(size), dim))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        batch, tokens, channels = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k = k + self.positional_encoding
        q, k = F.relu(q) + 1e-6, F.relu(k) + 1e-6
        scale = F.softplus(self.scale)
        q, k = q / scale, k / scale
        q_norm, k_norm = q.norm(dim=-1, keepdim=True), k.norm(dim=-1, keepdim=True)
        q, k = q**self.factor, k**self.factor
        q, k = q / q.norm(dim=-1, keepdim=True) * q_norm, k / k.norm(dim=-1, keepdim=True) * k_norm
        q, k, v = (part.reshape(batch, tokens, self.heads, -1).transpose(1, 2) for part in (q, k, v))  # (B, h, N, d)
        z = 1 / (q @ k.mean(dim=-2, keepdim=True).mT + 1e-6)
        context = (k.mT * tokens**-0.5) @ (v * tokens**-0.5)
        out = (q @ context * z).transpose(1, 2).reshape(x.shape)
        plane = v.mT.reshape(batch * self.heads, -1, *self.size)  # (B h, d, H, W)
        local: Tensor = self.dwc(plane).reshape(batch, channels, tokens).mT
        projected: Tensor = self.proj(out + local)
        return projected


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
        modules = [AuthorsFocused(dim, size, heads), Ours(dim, size, heads, "focused")]
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


def memory(names: Sequence[str], compiled: bool) -> None:
    """MiB kept for backward by a layer at the first shape."""
    batch, tokens, dim, heads = SHAPES[0]
    size = (math.isqrt(tokens),) * 2
    x = torch.randn(batch, tokens, dim, requires_grad=True)
    makers: dict[str, Callable[[], nn.Module]] = {name: partial(Ours, dim, size, heads, name) for name in names}
    makers["the authors' focused"] = partial(AuthorsFocused, dim, size, heads)
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
    for part in ("authors", "mechanisms", "memory"):
        parser.add_argument(f"--{part}", action="store_true", help="this table")
    parser.add_argument("--compiled", action="store_true", help="memory of compiled layers, too")
    parser.add_argument("--names", nargs="*", default=linvit.list_attentions(), help="mechanisms; default: all")
    parser.add_argument("--rounds", type=int, default=20, help="measured runs of each")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    given = parser.parse_args()
    every = not (given.authors or given.mechanisms or given.memory)
    keep_memory()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {given.threads} thread(s), {given.rounds} runs; in brackets: processor time")
    if every or given.memory:
        memory(given.names, given.compiled)
    if every or given.authors:
        authors(given.rounds)
    if every or given.mechanisms:
        mechanisms(given.rounds, given.names)


if __name__ == "__main__":
    main()
