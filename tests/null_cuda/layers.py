"""Launches and bytes of each attention layer on a GPU, and of authors', counted on a CUDA device that is not there.

A layer (64, 3136, 96) with 3 heads runs under bfloat16 autocast, forward and backward. Launches are what torch asks of
the CUDA runtime and of cuBLAS; bytes are those of the tensors that each of its operators reads and writes, of which a
cache may save a part. Nothing here is a time.

Example:
    $ python -m tests.null_cuda.layers linear focused
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linvit import AttentionLayer, Grid, list_attentions
from linvit.tasks.execution import keep_attention_features
from tests.null_cuda.device import HERE, Calls, build, missing, run

BATCH, SIDE, DIM, HEADS = 64, 56, 96, 3
UNTOUCHED = {"aten::_unsafe_view", "aten::detach", "aten::empty", "aten::empty_like", "aten::empty_strided"}
UNTOUCHED |= {"aten::new_empty", "aten::new_empty_strided"}
UNTOUCHED |= {"linvit::linear_attention", "linvit::linear_attention_backward"}  # whose programs are counted one by one


class Traffic(TorchDispatchMode):
    """Adds up the bytes of the tensors that operators read and write; `print` also shows each of them."""

    def __init__(self, shown: bool = False) -> None:
        super().__init__()
        self.bytes, self.shown = 0, shown

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        out = func(*args, **(kwargs or {}))
        views = any(given.alias_info and not given.alias_info.is_write for given in func._schema.returns)
        if not views and func._schema.name not in UNTOUCHED:
            tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
            moved = sum(map(touched, tensors))
            self.bytes += moved
            if self.shown:
                print(f"  {moved / 1e6:7.1f} MB {func._schema.name}", *(f"{x.dtype}{[*x.shape]}" for x in tensors))
        return out


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


def touched(x: Tensor) -> int:
    """Bytes of a tensor, with broadcast dimensions once."""
    return x.element_size() * torch.Size([n for n, stride in zip(x.shape, x.stride(), strict=True) if stride]).numel()


def row(name: str, step: Callable[[], Tensor], shown: bool) -> str:
    """Counts a forward and a backward pass under autocast, the second time that they run."""
    for show in (False, shown):
        PROGRAMS.clear()
        with Traffic(show) as there, Calls() as up, torch.autocast("cuda", torch.bfloat16):
            out = step()
        gradient = torch.zeros_like(out)
        up.launches, there.bytes = up.launches + PROGRAMS.launches, there.bytes + PROGRAMS.bytes
        PROGRAMS.clear()
        with Traffic(show) as back, Calls() as down:
            out.backward(gradient)
        down.launches, back.bytes = down.launches + PROGRAMS.launches, back.bytes + PROGRAMS.bytes
    figures = up.launches, down.launches, f"{there.bytes / 1e9:.2f}", f"{back.bytes / 1e9:.2f}"
    return f"| {name} | {' | '.join(map(str, figures))} |"


def count(names: list[str], shown: bool, recompute: bool, kernel: bool) -> None:
    """Prints a row for each mechanism, and one for the layer of each of the authors."""
    sys.path.append(str(HERE.parents[1] / "benchmarks"))
    from authors.focused import Focused

    torch.backends.cuda.enable_cudnn_sdp(False)  # a graph of cuDNN's, which is not stood in for: torch's own kernel
    grid = Grid((SIDE, SIDE))
    x = torch.zeros(BATCH, SIDE * SIDE, DIM, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    for name in names:
        if name == "authors":
            theirs = Focused(DIM, grid.size, HEADS).cuda()
            print(row("focused of its authors", lambda layer=theirs: layer(x), shown), flush=True)
            continue
        ours = AttentionLayer(DIM, HEADS, grid, attention=name).cuda().train()
        if not recompute:
            keep_attention_features(ours)
        ours.mechanism.attention_kernel = "triton" if kernel else "torch"
        print(row(name, lambda layer=ours: layer(x, grid), shown), flush=True)


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="mechanisms, and authors; default: all")
    parser.add_argument("--operators", action="store_true", help="show each operator with its bytes, too")
    parser.add_argument("--recompute", action="store_true", help="count with `recompute_attention: true`")
    parser.add_argument("--kernel", action="store_true", help="count with `attention_kernel: triton`")
    given = parser.parse_args()
    if "CALLS" in os.environ:
        names = given.names or [*list_attentions(), "authors"]
        print("| layer | launches forward | backward | GB forward | backward |\n|---|---|---|---|---|", flush=True)
        if given.kernel:
            from linvit.attention.kernels import linear

            linear.launch = PROGRAMS
        count(names, given.operators, given.recompute, given.kernel)
        sys.stdout.flush()
        os._exit(0)  # a thread of autograd that still wants the interpreter while it ends would abort the process
    if (lack := missing()) is not None:
        print(lack, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        done = run(build(Path(folder)), Path(os.devnull), ["-m", "tests.null_cuda.layers", *sys.argv[1:]])
    print(done.stdout, done.stderr[-2000:] if done.returncode else "")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
