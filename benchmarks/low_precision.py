"""Errors of attention against float64 when products of matrices are in TensorFloat-32 or bfloat16, emulated on a CPU.

Factors of matrix products and convolutions are rounded to 10 bits (TF32) or 7 (bfloat16) and multiplied in float32, as
tensor cores do. `lean.py --precision` prints the table.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from linvit.testing.attention.inputs import AttentionSubject
from linvit.testing.attention.precision import PRECISIONS, Precision, exact_results, run_at
from linvit.testing.numbers import relative_error

ATEN = torch.ops.aten
FACTORS = {  # which arguments of a product are its factors
    ATEN.mm.default: (0, 1),
    ATEN.bmm.default: (0, 1),
    ATEN.addmm.default: (1, 2),
    ATEN.baddbmm.default: (1, 2),
    ATEN.convolution.default: (0, 1),
}


def tf32(x: Tensor) -> Tensor:
    """Float32 rounded to the 10 bits of TF32's mantissa, to nearest even."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def bfloat16(x: Tensor) -> Tensor:
    """Float32 rounded to bfloat16."""
    return x.bfloat16().float()


class Rounded(TorchDispatchMode):
    """Rounds the float32 factors of products, everywhere or only where torch's setting asks for TF32."""

    def __init__(self, rounding: Callable[[Tensor], Tensor], everywhere: bool) -> None:
        super().__init__()
        self.rounding, self.everywhere = rounding, everywhere

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        if func in FACTORS and (self.everywhere or torch.backends.mkldnn.matmul.fp32_precision == "tf32"):
            given = list(args)
            for i in FACTORS[func]:
                given[i] = self.rounding(given[i]) if given[i].dtype == torch.float32 else given[i]
            args = tuple(given)
        return func(*args, **(kwargs or {}))


def errors(name: str, precision: Precision, context: AbstractContextManager[object]) -> str:
    """The largest relative errors of output and gradients at N = 49, 196 and 784, d = 32, for unit inputs."""
    output = gradient = 0.0
    for side in (7, 14, 28):
        with context:
            run = run_at(AttentionSubject(name, 64, 2, True), precision, side, torch.clone)
        exact = exact_results(run)
        found = {key: relative_error(tensor, exact[key]) for key, tensor in run.results.items()}
        output = max(output, found.pop("output"))
        gradient = max(gradient, *found.values())
    return f"{output:.0e} / {gradient:.0e}"


def rows(names: Sequence[str]) -> None:
    """Prints a row for each mechanism."""
    plain, autocast = PRECISIONS[0], PRECISIONS[3]
    for name in names:
        row = [errors(name, plain, nullcontext()), errors(name, plain, Rounded(tf32, everywhere=True))]
        torch.set_float32_matmul_precision("high")
        row.append(errors(name, plain, Rounded(tf32, everywhere=False)))
        torch.set_float32_matmul_precision("highest")
        row += [errors(name, autocast, nullcontext()), errors(name, autocast, Rounded(bfloat16, everywhere=True))]
        print(f"| {name} | {' | '.join(row)} |", flush=True)
