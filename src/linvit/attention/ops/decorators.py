"""Decorators that run a method in at least float32, or again in the backward pass to store only its inputs.

The features, sums and normalisers of linear attention take several times the memory of q, k and v, which the host's
projection stores anyway, and a small part of a training step's time (`benchmarks/lean.py`).
"""

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.backends import cuda, cudnn, mkldnn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from linvit.attention.ops.functional import is_exporting, upcast

Self = TypeVar("Self")
Module = TypeVar("Module", bound=nn.Module)
P = ParamSpec("P")
IEEE = ("none", "ieee")
"""torch's settings under which products of float32 tensors are IEEE float32."""
BFLOAT16_DEVICES = {"cuda"}
"""Types of devices on which methods under `mixed_precision` keep bfloat16. A CPU is faster in float32."""


def full_precision(
    core: Callable[Concatenate[Self, Tensor, Tensor, Tensor, P], Tensor],
) -> Callable[Concatenate[Self, Tensor, Tensor, Tensor, P], Tensor]:
    """Decorates a method `(self, q, k, v, ...) -> o`, such as `forward`, to run in at least float32 with autocast off.

    Half precision has too few digits for sums over many tokens and for quotients, and float16 ends at 65504. q, k and v
    of any shape are upcast, and `o` is cast to v's dtype; float32 and float64 are unchanged. Further arguments and
    parameters of the module are not cast: write `self.scale.to(q.dtype)`.

    Products of float32 matrices inside are IEEE float32 under any `torch.set_float32_matmul_precision`; their gradients
    follow it. Not in compiled code; see `ieee_products`.

    Example:
        >>> class Cosine(linvit.Attention):
        ...     @linvit.full_precision
        ...     def forward(self, q, k, v, grid): ...
    """
    return _in_precision(core, _upcast_heads)


def mixed_precision(
    core: Callable[Concatenate[Self, Tensor, Tensor, Tensor, P], Tensor],
) -> Callable[Concatenate[Self, Tensor, Tensor, Tensor, P], Tensor]:
    """Decorates a method as `full_precision` does, but on a GPU q, k and v stay in bfloat16 where v is.

    Products and sums are accumulated in float32, and their results are rounded, which halves the memory traffic.
    For a method whose outputs and gradients are then still about as close to float64 as those of softmax attention's
    fused kernel. float16, which overflows at 65504, is always upcast.
    """

    def cast(x: Tensor) -> Tensor:
        return x if x.dtype == torch.bfloat16 and x.device.type in BFLOAT16_DEVICES else _upcast_heads(x)

    return _in_precision(core, cast)


def _in_precision(
    core: Callable[Concatenate[Self, Tensor, Tensor, Tensor, P], Tensor], cast: Callable[[Tensor], Tensor]
) -> Callable[Concatenate[Self, Tensor, Tensor, Tensor, P], Tensor]:
    """Returns a method that runs on q, k and v in the dtype of `cast(v)`, with autocast off."""

    @functools.wraps(core)
    def run(self: Self, q: Tensor, k: Tensor, v: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        dtype = v.dtype
        if not q.dtype == k.dtype == dtype == torch.float32:
            q, k, v = cast(q), cast(k), cast(v)
            if v.dtype == torch.bfloat16:
                q, k = q.to(v.dtype), k.to(v.dtype)
        if q.is_meta:  # which has no autocast
            return core(self, q, k, v, *args, **kwargs).to(dtype)
        device = q.device
        with ieee_products(device):
            # torch cannot save a program with a loop in a region without autocast
            loop = getattr(self, "exports_loop", False) and is_exporting()
            if (torch.compiler.is_compiling() and not loop) or torch.is_autocast_enabled(device.type):
                with torch.autocast(device.type, enabled=False):
                    return core(self, q, k, v, *args, **kwargs).to(dtype)
            return core(self, q, k, v, *args, **kwargs).to(dtype)

    return run


def _upcast_heads(x: Tensor) -> Tensor:
    """`upcast`, on a GPU in one pass with bringing heads together, as products of them read them."""
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and not torch.compiler.is_compiling():
        return x.to(torch.float32, memory_format=torch.contiguous_format)
    return upcast(x)


def ieee_products(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context in which products of float32 tensors are IEEE float32, not TensorFloat-32 or bfloat16.

    TF32 keeps 10 bits of the factors: products then have errors of 1e-3, ill-conditioned results larger ones. torch's
    settings are global, and restored. Compiled code keeps them, since torch cannot compile their change.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    products, convolutions = (cuda.matmul, cudnn.conv) if device.type == "cuda" else (mkldnn.matmul, mkldnn.conv)  # type: ignore[attr-defined]
    if products.fp32_precision in IEEE and convolutions.fp32_precision in IEEE:
        return nullcontext()
    return _ieee_products(products, convolutions)


@contextmanager
def _ieee_products(*settings: Any) -> Iterator[None]:
    lowered = [(setting, given) for setting in settings if (given := setting.fp32_precision) not in IEEE]
    try:
        for setting, _ in lowered:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, given in lowered:
            setting.fp32_precision = given


def recomputed(core: Callable[Concatenate[Module, P], Tensor]) -> Callable[Concatenate[Module, P], Tensor]:
    """Decorates a method, such as `(self, q, k, v, grid) -> o`, to store only its inputs for the backward pass.

    The backward pass runs it again, by `torch.utils.checkpoint`. So the method must compute the same when it is
    called again: no random numbers, no counters. Write it above `@linvit.full_precision`, so that half-precision
    inputs are stored as such. Nothing is recomputed if the module's attribute `recompute` is False.

    Example:
        >>> class Block(nn.Module):
        ...     @linvit.recomputed
        ...     def forward(self, x): ...
    """

    @functools.wraps(core)
    def run(self: Module, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        if torch.is_grad_enabled() and getattr(self, "recompute", True):
            return in_backward_again(core, self, *args, **kwargs)
        return core(self, *args, **kwargs)

    return run


def in_backward_again(
    core: Callable[Concatenate[Module, P], Tensor], module: Module, /, *args: P.args, **kwargs: P.kwargs
) -> Tensor:
    """Calls a module's method now and again in the backward pass, so that only its arguments are stored.

    It is called once where other code decides what is stored: in `torch.compile`, `torch.export`, `torch.jit.trace`, in
    transforms of `torch.func`, and for forward-mode derivatives.
    """
    tensors = [x for x in args if isinstance(x, Tensor)]
    if is_traced(*tensors):
        return core(module, *args, **kwargs)
    parameters = dict(module.named_parameters())

    def call(*args: Any) -> Tensor:
        if all(map(operator.is_, parameters.values(), module.parameters())):
            return core(module, *args, **kwargs)
        # `torch.func.functional_call` has ended between forward and backward.
        given: dict[str, Tensor] = {f"module.{name}": parameter for name, parameter in parameters.items()}
        return functional_call(_Call(module, core), given, args, kwargs)  # type: ignore[no-any-return]

    return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False)


class _Call(nn.Module):
    """Method of a module, as a module that `torch.func.functional_call` can give other parameters."""

    def __init__(self, module: nn.Module, core: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self.core = module, core

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.core(self.module, *args, **kwargs)


def is_traced(*tensors: Tensor) -> bool:
    """Returns True if something besides autograd's backward pass differentiates or traces a call with these tensors."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    if torch.compiler.is_compiling() or tracing or tensors[0].is_meta or in_transform():
        return True
    return any([forward_ad.unpack_dual(x).tangent is not None for x in tensors])  # noqa: C419  # no frame for each


def in_transform() -> bool:
    """Returns True in a transform of `torch.func`, in which an autograd function must be written differently.

    torch has no public function for this; `torch.autograd.Function` itself uses the same test.
    """
    return torch._C._functorch.maybe_current_level() is not None


def supports_custom_autograd(x: Tensor) -> bool:
    """Returns True if a `torch.autograd.Function` may use x: also compiled, but not in export or `torch.func`."""
    if torch.compiler.is_compiling():
        # torch 2.11, which loses gradients where it compiles such a function, reports export in that case.
        return not torch.compiler.is_exporting() and not in_transform()
    return not is_traced(x)


PRECISIONS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Tensor]]] = {
    "float32": full_precision,
    "mixed": mixed_precision,
    "inherit": lambda core: core,
}
"""Decorators of a mechanism's `core`, by its attribute `precision`."""
