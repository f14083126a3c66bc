"""Launches, bytes, registers, spills and shared memory of the Triton kernels of attention, without a GPU.

`python benchmarks/kernels.py` prints the tables of docs/gpu.md. The programs are those that `linvit.attention.kernels`
launches for a training step; they are compiled for each architecture by Triton's own ptxas, and none is run.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from linvit.attention.kernels import Formula, linear, linear_attention, programs

ARCHITECTURES = {80: "A100", 90: "H100", 100: "B200"}
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
CASES = {
    "elu": Formula("elu", eps=1e-6),
    "elu, rotary": Formula("elu", eps=1e-6),
    "elu, rotary, difference": Formula("elu", eps=1e-6, difference=0.2),
    "softmax": Formula("softmax"),
    "focused": Formula("focused", eps=1e-6, relu_eps=1e-6, power=3.0),
}
LAYER = 64, 3136, 3, 32  # images, tokens, heads, channels of a head: docs/gpu.md
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def step(case: str, batch: int, tokens: int, heads: int, width: int, dtype: torch.dtype) -> list[list[Launch]]:
    """The programs of a forward and of a backward pass with their arguments, and sums of torch; none runs."""
    found: list[list[Launch]] = [[], []]
    passed = 0

    def record(program: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        found[passed].append((program, arguments, constants))

    def total(x: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        out = x.new_empty(x.shape[1:])
        found[passed].append((torch.sum, (x, out), {}))
        return out

    q, k, v = (torch.zeros(batch, tokens, heads, width, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    formula = CASES[case]
    if "rotary" in case:
        formula = formula._replace(turns=(torch.zeros(tokens, width // 2, 2),) * 2)
    if case == "focused":
        tables = [torch.ones(size).requires_grad_() for size in ((tokens, heads * width), (heads * width,))]
        formula = formula._replace(shift=tables[0], factor=tables[1])
    with mock.patch.object(linear, "launch", record), mock.patch.object(torch.Tensor, "sum", total):
        out = linear_attention(q, k, v, formula)
        passed = 1
        out.backward(torch.zeros_like(out))
    return found


def traffic(case: str) -> str:
    """Launches and bytes of a layer's size, each tensor of a launch once, one that is changed in place twice."""
    batch, tokens, heads, width = LAYER
    passes = step(case, *LAYER, torch.bfloat16)
    bound = 2 * batch * tokens * heads * width  # of q
    moved = []
    for launches in passes:
        tensors = [(program, x) for program, arguments, _ in launches for x in arguments if torch.is_tensor(x)]
        changed = [x for program, x in tensors if program is programs.focus and x.dtype == torch.bfloat16][2:]
        moved.append(sum(x.nbytes for _, x in tensors) + sum(x.nbytes for x in changed))
    counts, gigabytes = " + ".join(str(len(one)) for one in passes), " + ".join(f"{n / 1e9:.2f}" for n in moved)
    return f"| {case} | {counts} | {gigabytes} | {moved[0] / bound / 4:.2f} / {moved[1] / bound / 7:.2f} |"


def usage(launch: Launch, architecture: int) -> str:
    """Registers, spilled bytes per thread, and KiB of shared memory per program."""
    program, arguments, constants = launch
    names = program.arg_names
    options = {name: constants[name] for name in ("num_warps", "num_stages") if name in constants}
    values = dict(zip(names, arguments, strict=False)) | constants
    signature, fixed, attributes = {}, {}, {}
    for place, name in enumerate(names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif name in constants or value is None or (value == 1 and isinstance(value, int)):
            signature[name], fixed[name] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    compiled = compile(
        ASTSource(program, signature, fixed, attributes), target=GPUTarget("cuda", architecture, 32), options=options
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        shown = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", shown)}
    return f"{found['REG']} / {found['STACK'] + found['LOCAL']} / {compiled.metadata.shared / 1024:.0f}"


def rows() -> Iterator[list[str]]:
    """A row of each program."""
    half = [(case, 32, torch.bfloat16) for case in CASES] + [("elu", 64, torch.bfloat16), ("elu", 128, torch.bfloat16)]
    for case, width, dtype in (*half, *(("elu", width, torch.float32) for width in (32, 64, 128))):
        for name, launches in zip(("forward", "backward"), step(case, 1, 4096, 2, width, dtype), strict=True):
            for launch in launches:
                if launch[0] is not torch.sum:
                    figures = [usage(launch, architecture) for architecture in ARCHITECTURES]
                    yield [case, str(width), str(dtype)[6:], name, f"`{launch[0].fn.__name__}`", *figures]


if __name__ == "__main__":
    print("| phi | launches | GB | over the fused bound |\n|---|---|---|---|")
    for case in CASES:
        print(traffic(case), flush=True)
    print()
    print(
        "| phi | d | dtype | pass | program | " + " | ".join(f"sm_{a} ({n})" for a, n in ARCHITECTURES.items()) + " |"
    )
    print("|---" * (5 + len(ARCHITECTURES)) + "|")
    for row in rows():
        print("| " + " | ".join(row) + " |", flush=True)
