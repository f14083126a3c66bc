"""Launches and bytes of each attention layer on a GPU, and of authors', counted on a CUDA device that is not there.

A layer (64, 3136, 96) with 3 heads runs under bfloat16 autocast, forward and backward. Launches are what torch asks of
the CUDA runtime and of cuBLAS; bytes are those of the tensors that each of its operators reads and writes, of which a
cache may save a part. Nothing here is a time.

`--write` makes the table of docs/guides/gpu.md again, but for what stands before its changes.

Example:
    $ python -m tests.null_cuda.layers linear focused
    $ python -m tests.null_cuda.layers --write
"""

import argparse
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from benchmarks.roofline import Operators, touched
from linvit import AttentionLayer, Grid, Packed, list_attentions
from linvit.attention.kernels.choice import MEASURED
from linvit.tasks.execution import keep_attention_features
from linvit.testing.attention import precision
from linvit.testing.attention.inputs import AttentionSubject
from tests.bfloat16 import bfloat16_stays, root_mean_square
from tests.null_cuda.device import HERE, Calls, build, missing, run

BATCH, SIDE, DIM, HEADS = 64, 56, 96, 3
KERNELS = {"linear_attention", "linear_attention_backward"}  # whose programs are counted one by one
DOCS = HERE.parents[1] / "docs" / "guides" / "gpu.md"
ROW = re.compile(r"\| (`?)([a-z_0-9 ]+)\1 \| (\d+) \+ (\d+) \| \d+ \+ \d+ \| ([\d.]+) \+ ([\d.]+) \|.*")
PAIR = r" ([\d.]+) \+ ([\d.]+) \|"
ROWS = re.compile(rf"^\| `(\w+)` \|{PAIR}{PAIR}{PAIR}{PAIR}", re.MULTILINE)
KERNEL_ROW = re.compile(rf"^\| `(\w+)` \|{PAIR}{PAIR}$", re.MULTILINE)
MEDIANS = re.compile(r"^The median of the \d+ is .*\nOf the 29 .*; with", re.MULTILINE)
LATER = {"circulant", "cosformer", "hedgehog", "lara", "monarch", "t5", "taylor_shift", "vittt", "vssd"}  # than the 29


class Programs:
    """Stands in for the launches of Triton's programs, which the null device lacks."""

    launches = bytes = 0

    def clear(self) -> None:
        """Begins to count."""
        self.launches = self.bytes = 0

    def __call__(self, program: Any, grid: Any, device: Any, *given: Any, **constants: Any) -> None:
        """Counts one, which finds in the cache what it reads again."""
        self.launches += 1
        self.bytes += sum(touched(x) for x in {id(x): x for x in tree_leaves(given)}.values() if isinstance(x, Tensor))


PROGRAMS = Programs()


def moved(operators: Operators, shown: bool) -> int:
    """Bytes of all operators; each is shown, too, if asked for."""
    called = [one for one in operators.called if one.name not in KERNELS]
    for one in called if shown else ():
        print(f"  {one.bytes / 1e6:7.1f} MB {one.name}")
    return PROGRAMS.bytes + sum(one.bytes for one in called)


def row(name: str, step: Callable[[], Tensor], shown: bool) -> str:
    """Counts a forward and a backward pass under autocast, the second time that they run."""
    for show in (False, shown):
        PROGRAMS.clear()
        with Operators() as there, Calls() as up, torch.autocast("cuda", torch.bfloat16):
            out = step()
        gradient = torch.zeros_like(out)
        launches, sizes = [up.launches + PROGRAMS.launches], [moved(there, show)]
        PROGRAMS.clear()
        with Operators() as back, Calls() as down:
            out.backward(gradient)
        launches, sizes = [*launches, down.launches + PROGRAMS.launches], [*sizes, moved(back, show)]
    return f"| {name} | {' | '.join([*map(str, launches), *(f'{size / 1e9:.2f}' for size in sizes)])} |"


def count(names: list[str], shown: bool, recompute: bool, kernel: bool, packed: bool) -> None:
    """Prints a row for each mechanism, and one for each layer of authors that `benchmarks` has."""
    sys.path.append(str(HERE.parents[1] / "benchmarks"))
    from authors.focused import Focused
    from authors.soft import SoftAttention

    torch.backends.cuda.enable_cudnn_sdp(False)  # a graph of cuDNN's, which is not stood in for: torch's own kernel
    grid = Grid((SIDE, SIDE))
    sizes = torch.randint(8, SIDE + 1, (BATCH - 1, 2), generator=torch.Generator().manual_seed(0)).tolist()
    place = Packed([*sizes, grid.size]) if packed else grid
    batch = 1 if packed else BATCH
    x = torch.zeros(batch, place.num_queries, DIM, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for name in names:
        if name == "authors":
            focused, soft = Focused(DIM, grid.size, HEADS).cuda(), SoftAttention(DIM, HEADS, SIDE // 7, 9).cuda()
            print(row("focused of its authors", lambda layer=focused: layer(x), shown), flush=True)
            print(row("soft of its authors", lambda layer=soft: layer(x, grid.size), shown), flush=True)
            continue
        ours = AttentionLayer(DIM, HEADS, grid, attention=name).cuda().train()
        if not recompute:
            keep_attention_features(ours)
        ours.mechanism.attention_kernel = "triton" if kernel else "torch"
        print(row(name, lambda layer=ours: layer(x, place), shown), flush=True)


def errors(name: str) -> tuple[float, float]:
    """Relative errors of output and worst gradient against float64 in what a GPU leaves in bfloat16, here on a CPU."""
    run_at = precision.run_at(AttentionSubject(name, DIM, HEADS, True), precision.PRECISIONS[3], 28, torch.clone)
    return root_mean_square(run_at)


def with_counts(text: str, counted: str) -> str:
    """The text of docs/guides/gpu.md with the rows of its table that were counted, and with their errors."""
    figures = r"\| ([\w ]+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+)"
    rows = {name: found for name, *found in re.findall(figures, counted)}
    with bfloat16_stays():
        kernel = errors("softmax")

    def replaced(row: re.Match[str]) -> str:
        """One row."""
        tick, name, *before = row.groups()
        if name not in rows:
            return row[0]
        up, down, there, back = rows[name]
        old = [float(x) for x in before]
        launches, moved = (int(up) + int(down)) / sum(old[:2]), (float(there) + float(back)) / sum(old[2:])
        error = ""
        if tick and name != "softmax":
            with bfloat16_stays():
                own = errors(name)
            if own != errors(name):  # without bfloat16
                error = " / ".join(f"{a / b:.1f}" for a, b in zip(own, kernel, strict=True))
        counts = f"{before[0]} + {before[1]} | {up} + {down} | {before[2]} + {before[3]} | {there} + {back}"
        return f"| {tick}{name}{tick} | {counts} | {launches:.2f} / {moved:.2f} | {error} |"

    text = ROW.sub(replaced, text)
    rows = {name: [float(x) for x in found] for name, *found in ROWS.findall(text)}  # before, after; launches, bytes
    first = rows.keys() - LATER
    (measured,) = MEASURED.values()  # on an H100
    quicker = {path.split(".")[-2] for path, ratio in measured.items() if ratio > 1}
    by_kernel = {name: [float(x) for x in found] for name, *found in KERNEL_ROW.findall(text) if name in quicker}
    taken = rows | {name: [*rows[name][:2], *row[:2], *rows[name][4:6], *row[2:]] for name, row in by_kernel.items()}
    said = f"The median of the {len(rows)} is {medians(rows, rows.keys())}.\n"
    said += f"Of the 29 mechanisms of the first count it is {medians(rows, first)}; {medians(taken, first)} with"
    return MEDIANS.sub(said, text)


def medians(rows: dict[str, list[float]], names: Iterable[str]) -> str:
    """What is left of the launches and bytes of some mechanisms."""
    left = ([sum(rows[name][i + 2 : i + 4]) / sum(rows[name][i : i + 2]) for name in names] for i in (0, 4))
    return "{:.2f} of the launches and {:.2f} of the bytes".format(*map(statistics.median, left))


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mechanisms, and authors; default: all")
    parser.add_argument("--operators", action="store_true", help="show each operator with its bytes, too")
    parser.add_argument("--recompute", action="store_true", help="count with `recompute_attention: true`")
    parser.add_argument("--kernel", action="store_true", help="count with `attention_kernel: triton`")
    parser.add_argument("--packed", action="store_true", help="count packed images of 8 x 8 to 56 x 56 tokens")
    parser.add_argument("--write", action="store_true", help="write the table of docs/guides/gpu.md")
    given = parser.parse_args()
    if "CALLS" in os.environ:
        names = given.names or [*list_attentions(), *["authors"][given.packed :]]
        print("| layer | launches forward | backward | GB forward | backward |\n|---|---|---|---|---|", flush=True)
        if given.kernel:
            from linvit.attention.kernels import linear

            linear.launch = PROGRAMS
        count(names, given.operators, given.recompute, given.kernel, given.packed)
        sys.stdout.flush()
        os._exit(0)  # a thread of autograd that still wants the interpreter while it ends would abort the process
    if (lack := missing()) is not None:
        print(lack, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        done = run(build(Path(folder)), Path(os.devnull), ["-m", "tests.null_cuda.layers", *sys.argv[1:]])
    print(done.stdout, done.stderr[-2000:] if done.returncode else "")
    if given.write and not done.returncode:
        DOCS.write_text(with_counts(DOCS.read_text(encoding="utf-8"), done.stdout), encoding="utf-8")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
