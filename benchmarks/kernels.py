"""Launches, bytes, registers, spills and shared memory of the Triton kernels of attention, without a GPU.

`python benchmarks/kernels.py` prints the tables of docs/guides/gpu.md. The programs are those that
`linvit.attention.kernels` launches for a training step; they are compiled for each architecture by Triton's own ptxas,
and none is run.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from linvit.attention.kernels import Formula, linear, linear_attention
from linvit.attention.packed import Packed

ARCHITECTURES = {80: "A100", 90: "H100", 100: "B200"}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
CASES = {
    "elu": Formula("elu", eps=1e-6),
    "elu, rotary": Formula("elu", eps=1e-6),
    "elu, rotary, difference": Formula("elu", eps=1e-6, difference=0.2),
    "softmax": Formula("softmax"),
    "focused": Formula("focused", eps=1e-6, relu_eps=1e-6, power=3.0),
}
WINDOWS = ", windows of 49 tokens"
SIZES = torch.randint(8, 57, (63, 2), generator=torch.Generator().manual_seed(0)).tolist()
PACK = Packed([*SIZES, (56, 56)])
LAYERS: dict[str, tuple[Any, int, int, int]] = {  # images, tokens, heads, channels of one
    "": (64, 3136, 3, 32),
    WINDOWS: (4096, 49, 3, 32),
    ", packed": (PACK, PACK.num_queries, 3, 32),
}
STEPS = ("focus", "FIRST", "focus", "SECOND", "focus")  # of programs.run, in the order of its arguments
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def step(
    case: str, images: int | Packed, tokens: int, heads: int, width: int, dtype: torch.dtype
) -> list[list[Launch]]:
    """The programs of a forward and of a backward pass with their arguments, and sums of torch; none runs.

    Of so many images, or of packed ones with so many tokens.
    """
    batch, packed = (1, images) if isinstance(images, Packed) else (images, None)
    found: list[list[Launch]] = [[], []]
    passed = 0

    def record(program: Any, grid: tuple[int, ...], device: Any, *arguments: Any, **constants: Any) -> None:
        found[passed].append((program, arguments, constants))

    def total(x: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        out = x.new_empty(x.shape[1:])
        found[passed].append((torch.sum, (x, out), {}))
        return out

    q, k, v = (torch.empty(batch, tokens, heads, width, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    formula = CASES[case]
    if "rotary" in case:
        formula = formula._replace(turns=(torch.zeros(tokens, width // 2, 2),) * 2)
    if case == "focused":
        tables = [torch.ones(size).requires_grad_() for size in ((tokens, heads * width), (heads * width,))]
        formula = formula._replace(shift=tables[0], factor=tables[1])
    accepted = mock.patch("linvit.attention.kernels.formula.INTERPRETED", True)
    with accepted, mock.patch.object(linear, "launch", record), mock.patch.object(torch.Tensor, "sum", total):
        out = linear_attention(q, k, v, formula, packed)
        passed = 1
        out.backward(torch.zeros_like(out))
    return found


def traffic(case: str, layer: str) -> str:
    """Launches and bytes of a layer's size, each tensor of a launch once: what it reads again lies in the cache."""
    images, tokens, heads, width = LAYERS[layer]
    passes = step(case, *LAYERS[layer], torch.bfloat16)
    bound = 2 * (1 if images is PACK else images) * tokens * heads * width  # of q
    moved = []
    for launches in passes:
        given = ({id(x): x for x in tree_leaves(arguments)}.values() for _, arguments, _ in launches)
        moved.append(sum(x.nbytes for leaves in given for x in leaves if torch.is_tensor(x)))
    counts, gigabytes = " + ".join(str(len(one)) for one in passes), " + ".join(f"{n / 1e9:.2f}" for n in moved)
    return f"| {case}{layer} | {counts} | {gigabytes} | {moved[0] / bound / 4:.2f} / {moved[1] / bound / 7:.2f} |"


def source(launch: Launch) -> dict[str, Any]:
    """The program of a launch and all that Triton compiles it for: launches with the same share it."""
    program, arguments, constants = launch
    names = program.arg_names
    fixed: dict[tuple[int, ...], Any] = {}
    attributes = {}

    def kind(value: Any, *path: int) -> Any:
        if isinstance(value, tuple):
            return tuple(kind(part, *path, place) for place, part in enumerate(value))
        if value is None or names[path[0]] in constants or (isinstance(value, int) and value == 1):
            fixed[path] = value
            return "constexpr"
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        return TYPES[value.dtype] if isinstance(value, torch.Tensor) else "fp32" if isinstance(value, float) else "i32"

    values = dict(zip(names, arguments, strict=False)) | constants
    signature = {name: kind(values[name], place) for place, name in enumerate(names)}
    return {"fn": program, "signature": signature, "constexprs": fixed, "attrs": attributes}


def usage(launch: Launch, architecture: int) -> str:
    """Registers, spilled bytes per thread, and KiB of shared memory per program."""
    options = {name: launch[2][name] for name in ("num_warps", "num_stages")}
    compiled = compile(ASTSource(**source(launch)), target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        shown = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown)}
    return f"{found['REG']} / {found['STACK'] + found['LOCAL']} / {compiled.metadata.shared / 1024:.0f}"


def steps(launch: Launch) -> str:
    """The steps of a launch."""
    _, arguments, constants = launch
    given = (name for name, argument in zip(STEPS, arguments[1:], strict=True) if argument is not None)
    return ", ".join(f"`{constants[name].fn.__name__ if name in constants else name}`" for name in given)


def rows() -> Iterator[list[str]]:
    """A row of each program."""
    half, single = torch.bfloat16, torch.float32
    wanted = [(case, "", 32, half) for case in CASES] + [(case, WINDOWS, 32, half) for case in ("elu", "focused")]
    wanted += [("elu", "", width, half) for width in (64, 128)] + [
        ("elu", "", width, single) for width in (32, 64, 128)
    ]
    for case, layer, width, dtype in wanted:
        for name, launches in zip(("forward", "backward"), step(case, *LAYERS[layer][:3], width, dtype), strict=True):
            for launch in launches:
                if launch[0] is not torch.sum:
                    figures = [usage(launch, architecture) for architecture in ARCHITECTURES]
                    yield [case + layer, str(width), str(dtype)[6:], name, steps(launch), *figures]


if __name__ == "__main__":
    print("| phi | launches | GB | over the fused bound |\n|---|---|---|---|")
    for layer, case in product(LAYERS, CASES):
        print(traffic(case, layer), flush=True)
    print()
    print("| phi | d | dtype | pass | steps | " + " | ".join(f"sm_{a} ({n})" for a, n in ARCHITECTURES.items()) + " |")
    print("|---" * (5 + len(ARCHITECTURES)) + "|")
    for row in rows():
        print("| " + " | ".join(row) + " |", flush=True)
