"""Time and memory of attention and of whole models in training: against the authors' code, compiled against eager.

- `--authors`: `AttentionLayer` with focused attention against `FocusedLinearAttention` as FLatten's authors compute it,
  forward and forward + backward, eager and compiled, at three shapes.
- `--mechanisms`: every mechanism's layer compiled, and without recomputing in backward, against itself eager.
- `--models`: whole models at 224 pixels against those of their authors (`authors/`), with the same weights: a forward
  pass, and a step of training (cross entropy, AdamW), eager, and with `--compiled` compiled, which takes minutes.
- `--precision`: errors of every mechanism against float64, output / gradients, with products in TF32 and bfloat16.
- `--memory`: MiB that every mechanism's layer keeps for backward, in float32 and under bfloat16 autocast.

Modules run as `linvit bench attention --layer` and `linvit bench backbone` run them, which show the same figures of any
mechanism, size or backbone with `--compile` and `--no_recompute`. Times are medians of runs in turns, so that whatever
else the machine does meets all of them; each ratio is given for wall time and for processor time. Without an argument:
all of these.

Example:
    $ python benchmarks/lean.py --models --names flatten_swin_tiny soft_tiny --rounds 5
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import get_args

import low_precision
import torch
from authors import MODELS
from authors.focused import Focused

import linvit
from linvit.analysis.operations import kept_for_backward
from linvit.experiments.bench.costs import PASSES, format_size
from linvit.experiments.bench.runner import Mode, Runner, Settings
from linvit.io.machine import keep_memory

SHAPES = [(4, (56, 56), 96, 3), (16, (28, 28), 192, 6), (32, (14, 14), 192, 3)]  # batch, patch grid, channels, heads
MODES: tuple[Mode, ...] = ("eager", "compiled")
Shape = tuple[int, tuple[int, int], int, int]
Pass = Callable[[], object]


def layer(shape: Shape, attention: str | None, settings: Settings, mode: Mode) -> Runner:
    """Our layer with an attention, or without one that of the authors of focused attention, ready to run."""
    batch, size, dim, heads = shape
    grid = linvit.Grid(size)
    x = torch.randn(batch, grid.num_queries, dim, requires_grad=True)
    if attention is None:
        return Runner(Focused(dim, size, heads), (x,), {}, settings, mode)
    return Runner(linvit.AttentionLayer(dim, heads, grid, attention=attention), (x, grid), {}, settings, mode)


def in_turns(runners: Sequence[Runner], kind: str, rounds: int) -> list[tuple[float, float]]:
    """Median seconds of a pass of each, of wall time and of processor time."""
    works: list[Pass] = [getattr(runner, kind) for runner in runners]
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
        "B, patches, C, heads",
        "pass",
        "eager, ours / theirs",
        "compiled, ours / theirs",
        "ours, compiled / eager",
        "ours ms",
    )
    for shape in SHAPES:
        torch.compiler.reset()
        batch, size, *widths = shape
        name = ", ".join(map(str, (batch, format_size(size), *widths)))
        runners = [layer(shape, attention, Settings(), mode) for mode in MODES for attention in (None, "focused")]
        for kind in Settings().passes:
            theirs, ours, theirs_compiled, ours_compiled = in_turns(runners, kind, rounds)
            row = ratio(ours, theirs), ratio(ours_compiled, theirs_compiled), ratio(ours_compiled, ours)
            print(f"| {name} | {PASSES[kind][0]} | {' | '.join(row)} | {ours[0] * 1e3:.1f} |", flush=True)


def mechanisms(rounds: int, names: Sequence[str]) -> None:
    """Every mechanism's layer at the first shape: compiled, and without recomputing, against eager."""
    table("attention", "pass", "compiled / eager", "no recompute / eager", "eager ms")
    for attention in names:
        torch.compiler.reset()
        runners = [layer(SHAPES[0], attention, Settings(), mode) for mode in get_args(Mode)[:3]]
        for kind in Settings().passes:
            eager, compiled, kept = in_turns(runners, kind, rounds)
            row = PASSES[kind][0], ratio(compiled, eager), ratio(kept, eager)
            print(f"| {attention} | {' | '.join(row)} | {eager[0] * 1e3:.1f} |", flush=True)


def models(rounds: int, names: Sequence[str], batch: int, compiled: bool) -> None:
    """Whole models against their authors'."""
    table("model", "pass", "eager, ours / theirs", "ours, s", *["compiled, ours / theirs"] * compiled)
    settings = Settings(optimizer=True)
    for name in names:
        torch.compiler.reset()
        theirs, ours = MODELS[name](), linvit.create_backbone(name)
        linvit.load_pretrained(ours, theirs.state_dict())
        images = torch.randn(batch, 3, 224, 224)
        with torch.no_grad():
            torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=1e-3, atol=1e-4)
        modes = MODES[: 1 + compiled]
        runners = [Runner(model, (images,), {}, settings, mode) for mode in modes for model in (theirs, ours)]
        for kind in settings.passes:
            times = in_turns(runners, kind, rounds)
            row = [ratio(times[1], times[0]), f"{times[1][0]:.2f}", *([ratio(times[3], times[2])] if compiled else [])]
            print(f"| {name} | {PASSES[kind][0]} | {' | '.join(row)} |", flush=True)


def memory(names: Sequence[str], compiled: bool) -> None:
    """MiB kept for backward by a layer at the first shape."""
    precisions = {"float32": Settings(), "bfloat16 autocast": Settings(dtype=torch.bfloat16, autocast=True)}
    ways = [(settings, mode) for mode in MODES[: 1 + compiled] for settings in precisions.values()]
    table("attention", *(f"{name}{mode}" for mode in ("", ", compiled")[: 1 + compiled] for name in precisions))
    for name in (*names, None):
        torch.compiler.reset()
        row = []
        for settings, mode in ways:
            runner = layer(SHAPES[0], name, settings, mode)
            runner.training_forward()  # what is made but once does not count
            row.append(f"{kept_for_backward(runner.training_forward, runner.trained) / 2**20:.1f}")
        print(f"| {'focused of its authors' if name is None else name} | {' | '.join(row)} |", flush=True)


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
