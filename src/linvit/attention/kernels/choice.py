"""Where attention is computed by a kernel in place of torch's operators: the option `attention_kernel`."""

import functools
import importlib.util
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from linvit.attention.kernels.formula import INTERPRETED, kernel_lacks, linear_attention
from linvit.attention.ops.decorators import takes_function
from linvit.errors import UserError

if TYPE_CHECKING:
    from linvit.attention.base import Attention, Grid

Kernel = Literal["auto", "triton", "torch"]
Findings = Mapping[str, Mapping[str, float]]
"""By device and mechanism: torch's time over the kernel's in bfloat16, at the least favourable size."""
MEASURED: Findings = {
    "NVIDIA H100 80GB HBM3": {  # benchmarks/2026-11-26-h100.md
        "linvit.attention.linear.LinearAttention": 2.18,
        "linvit.attention.focused.FocusedAttention": 2.44,
        "linvit.attention.slab.SimplifiedLinearAttention": 1.87,
        "linvit.attention.mala.MALAAttention": 2.79,
        "linvit.attention.mlla.MLLAAttention": 2.45,
        "linvit.attention.rala.RALAAttention": 1.35,
        "linvit.attention.efficient.EfficientAttention": 0.68,
    }
}
WIDEST_MEASURED = 64  # channels of a head


def with_kernel(core: Callable[[Any, Tensor, Tensor, Tensor, "Grid"], Tensor]) -> Callable[..., Tensor]:
    """Decorates a method `(self, q, k, v, grid) -> o` of a mechanism that has a `formula(q, k, grid)` of it.

    On a GPU its attribute `attention_kernel` chooses between the kernel ("triton"), the method itself ("torch"), and
    what was measured to be quicker on such a GPU ("auto"), by us or by `linvit bench attention --kernel`. "auto" is the
    method where nothing was measured: compiled, for wider heads, and in other precisions than bfloat16.
    A subclass that computes the same must name its own `formula`: it is not inherited.
    """

    @functools.wraps(core)
    def run(self: "Attention", q: Tensor, k: Tensor, v: Tensor, grid: "Grid") -> Tensor:
        if (v.is_cuda or INTERPRETED) and _chosen(self, q, k, v):
            formula = self.formula(q, k, grid)
            if formula is not None:
                return linear_attention(q, k, v, formula)
        return core(self, q, k, v, grid)

    return run


def has_kernel(module: nn.Module) -> bool:
    """Whether a module is a mechanism with a formula of its own."""
    return "formula" in vars(type(module))


def set_attention_kernel(network: nn.Module, kernel: Kernel) -> None:
    """Sets `attention_kernel` of all mechanisms in a network. A `UserError` says why "triton" is not possible."""
    mechanisms = [module for module in network.modules() if hasattr(module, "attention_kernel")]
    if kernel == "triton":
        lacks = [] if importlib.util.find_spec("triton") else ["the package triton"]
        lacks += [] if INTERPRETED or torch.cuda.is_available() else ["a CUDA device"]
        if lacks:
            raise UserError(
                f"attention_kernel=triton needs {' and '.join(lacks)}, which this machine lacks; leave it out, or set "
                f"torch"
            )
        if not any(map(has_kernel, mechanisms)):
            given = ", ".join(sorted({type(module).__name__ for module in mechanisms})) or "no attention of linvit"
            raise UserError(
                f"attention_kernel=triton: there is no kernel for {given}; linear, focused, slab, efficient, mala, "
                f"rala and mlla have one. Leave it out, or set torch"
            )
    for module in mechanisms:
        module.attention_kernel = kernel  # type: ignore[assignment]


def _chosen(mechanism: "Attention", q: Tensor, k: Tensor, v: Tensor) -> bool:
    if mechanism.attention_kernel == "torch" or not has_kernel(mechanism) or not takes_function(v):
        return False
    if kernel_lacks(q, k, v) is not None:
        return False
    if mechanism.attention_kernel == "triton":
        return True
    if not v.is_cuda or torch.compiler.is_compiling():  # compiled networks are fused otherwise than what was measured
        return False
    if v.dtype != torch.bfloat16 or max(q.shape[-1], v.shape[-1]) > WIDEST_MEASURED:
        return False
    return _measured(kernel_name(type(mechanism)), v.device.index)


def kernel_name(mechanism: Callable[..., Any]) -> str:
    """The class, as findings name it."""
    return f"{mechanism.__module__}.{mechanism.__qualname__}"


def _measured(name: str, device: int) -> bool:
    """Whether the kernel of a mechanism was found to be quicker on such a device."""
    return findings().get(torch.cuda.get_device_name(device), {}).get(name, 0) > 1


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "linvit" / "attention_kernels.json"


@functools.cache
def findings() -> Findings:
    """What is known: `MEASURED`, and before it what was measured on this machine."""
    own = _own()
    return {device: {**MEASURED.get(device, {}), **own.get(device, {})} for device in {**MEASURED, **own}}


def _own() -> dict[str, dict[str, float]]:
    try:
        known = json.loads(_file().read_text(encoding="utf-8"))
        return {device: {name: float(ratio) for name, ratio in ratios.items()} for device, ratios in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # a file that others have changed
        return {}


def add_findings(device: str, ratios: Mapping[str, float]) -> Path:
    """Writes measurements for a device; returns the file."""
    known = _own()
    known.setdefault(device, {}).update(ratios)
    path = _file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1, sort_keys=True), encoding="utf-8")
    findings.cache_clear()
    return path
