"""Choice between a kernel and torch's operators for an attention: the option `attention_kernel`.

"triton" selects linvit's own kernels. Another package announces a function with the signature of `Kernel` in the
entry-point group `linvit.attention_kernels`, or registers it by `linvit.register_attention_kernel`.
"""

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from linvit.attention.kernels.formula import INTERPRETED, Formula, kernel_lacks, linear_attention
from linvit.attention.ops.decorators import supports_custom_autograd
from linvit.attention.packed import Packed
from linvit.errors import UserError, check_choice
from linvit.registry import attention_kernels

if TYPE_CHECKING:
    from linvit.attention.base import Attention, Grid

Kernel = Callable[[Tensor, Tensor, Tensor, Formula], Tensor | None]
"""Computes a formula of q (B, h, N, dk), k (B, h, M, dk) and v (B, h, M, d), with gradients: (B, h, N, d) in v's dtype;
None if it does not support the formula, the device or the precision."""
MEASURED: Mapping[str, Mapping[str, float]] = {
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
"""Ratio of torch's time to Triton's, by device and mechanism, in bfloat16, at the least favourable size."""
WIDEST_MEASURED = 64  # channels of a head


def kernel_output(mechanism: "Attention", q: Tensor, k: Tensor, v: Tensor, grid: "Grid") -> Tensor | None:
    """Returns the output of a mechanism's `core` by a kernel; None if torch's operators should compute it.

    Its attribute `attention_kernel` is the name of a kernel ("triton"), "torch" for torch's operators, or "auto" for
    the fastest on this GPU by the table `MEASURED`. "auto" means torch's operators without a measurement: in
    compiled networks, for wider heads, and in other precisions than bfloat16.
    Of packed images, for which none was measured and which other packages do not know, "triton" alone computes them.
    A subclass that computes the same must define its own `formula`: it is not inherited.
    """
    packed = grid if isinstance(grid, Packed) else None
    if packed is not None and (mechanism.attention_kernel != "triton" or torch.compiler.is_compiling()):
        return None
    name = _chosen(mechanism, q, v)
    formula = None if name is None else mechanism.formula(q, k, grid)
    if name is None or formula is None:
        return None
    return _kernel(name)(q, k, v, formula) if packed is None else _by_triton(q, k, v, formula, packed)


def has_kernel(module: nn.Module) -> bool:
    """True if a module is a mechanism whose class defines `formula`."""
    return "formula" in vars(type(module))


def _by_triton(q: Tensor, k: Tensor, v: Tensor, formula: Formula, packed: Packed | None = None) -> Tensor | None:
    return linear_attention(q, k, v, formula, packed) if kernel_lacks(q, k, v) is None else None


_loaded: dict[str, Kernel] = {"triton": _by_triton}


def kernel_names() -> list[str]:
    """Returns the names of all kernels, including those of other packages."""
    return ["triton", *attention_kernels.names()]


def _kernel(name: str) -> Kernel:
    if name not in _loaded:
        _loaded[name] = attention_kernels.get(name)
    return _loaded[name]


def set_attention_kernel(network: nn.Module, kernel: str) -> None:
    """Sets `attention_kernel` of all mechanisms in a network. Raises a `UserError` if a kernel cannot be used."""
    mechanisms = [module for module in network.modules() if hasattr(module, "attention_kernel")]
    if kernel not in ("auto", "torch"):
        if ":" not in kernel:
            check_choice("attention_kernel", kernel, ["auto", "torch", *kernel_names()])
        _kernel(kernel)
        if kernel == "triton":
            _check_triton()
        if not any(map(has_kernel, mechanisms)):
            given = ", ".join(sorted({type(module).__name__ for module in mechanisms})) or "no attention of linvit"
            raise UserError(
                f"attention_kernel={kernel}: {given} has no kernel; linear, focused, slab, efficient, mala, "
                f"rala and mlla have one. Remove the option, or set torch"
            )
    for module in mechanisms:
        module.attention_kernel = kernel  # type: ignore[assignment]


def _check_triton() -> None:
    lacks = [] if importlib.util.find_spec("triton") else ["the package triton"]
    lacks += [] if INTERPRETED or torch.cuda.is_available() else ["a CUDA device"]
    if lacks:
        raise UserError(
            f"attention_kernel=triton needs {' and '.join(lacks)}, which this machine lacks; remove it, or set torch"
        )


def _chosen(mechanism: "Attention", q: Tensor, v: Tensor) -> str | None:
    """Returns the kernel that computes a mechanism; None for torch's operators."""
    name = mechanism.attention_kernel
    if name == "torch" or not has_kernel(mechanism) or not supports_custom_autograd(v):
        return None
    if name != "auto":
        return name
    if torch.compiler.is_compiling():  # compiled networks are fused differently from the measured ones
        return None
    if v.dtype != torch.bfloat16 or max(q.shape[-1], v.shape[-1]) > WIDEST_MEASURED:
        return None
    ratios = MEASURED.get(torch.cuda.get_device_name(v.device.index), {})
    return "triton" if ratios.get(mechanism_name(type(mechanism)), 0) > 1 else None


def mechanism_name(mechanism: Callable[..., Any]) -> str:
    """Returns the name of the class in `MEASURED`."""
    return f"{mechanism.__module__}.{mechanism.__qualname__}"
