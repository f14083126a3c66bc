"""What the Triton kernels of attention ask of a GPU: registers, spills and shared memory, compiled without a device.

`python benchmarks/kernels.py` prints the table of docs/gpu.md. The programs are those that `linvit.attention.kernels`
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

from linvit.attention.kernels import Formula, linear, linear_attention

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
TOKENS, HEADS = 4096, 2
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


def launches(case: str, width: int, dtype: torch.dtype) -> list[Launch]:
    """The programs of a training step at heads of a width, with their arguments; they do not run."""
    found: list[Launch] = []

    def record(program: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        found.append((program, arguments, constants))

    q, k, v = (torch.zeros(1, TOKENS, HEADS, width, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    formula = CASES[case]
    if "rotary" in case:
        formula = formula._replace(turns=(torch.zeros(TOKENS, width // 2, 2),) * 2)
    if case == "focused":
        formula = formula._replace(shift=torch.zeros(TOKENS, HEADS * width), factor=torch.ones(HEADS * width))
    with mock.patch.object(linear, "launch", record):
        linear_attention(q, k, v, formula).sum().backward()
    return found


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
        for launch in launches(case, width, dtype):
            figures = [usage(launch, architecture) for architecture in ARCHITECTURES]
            yield [case, str(width), str(dtype)[6:], f"`{launch[0].fn.__name__}`", *figures]


if __name__ == "__main__":
    print("| phi | d | dtype | program | " + " | ".join(f"sm_{a} ({n})" for a, n in ARCHITECTURES.items()) + " |")
    print("|---" * (4 + len(ARCHITECTURES)) + "|")
    for row in rows():
        print("| " + " | ".join(row) + " |", flush=True)
