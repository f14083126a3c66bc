"""Numerically delicate mathematics runs in at least float32, also under autocast."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.backends import cuda, cudnn, mkldnn

Self = TypeVar("Self")
P = ParamSpec("P")
IEEE = ("none", "ieee")
"""torch's settings under which products of float32 tensors are IEEE float32."""


def upcast(x: Tensor) -> Tensor:
    """Half precision to float32; float32 and float64 stay what they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def full_precision(
    core: Callable[Concatenate[Self, Tensor, Tensor, Tensor, P], Tensor],
) -> Callable[Concatenate[Self, Tensor, Tensor, Tensor, P], Tensor]:
    """Decorates a method `(self, q, k, v, ...) -> o`, such as `forward`, to run in at least float32 with autocast off.

    Half precision has too few digits for sums over many tokens and for quotients, and float16 ends at 65504. q, k and v
    of any shape are cast up, and `o` gets v's dtype back; float32 and float64 stay what they are. Further arguments and
    parameters of the module are not cast: write `self.scale.to(q.dtype)`.

    Products of float32 matrices inside are IEEE float32 under any `torch.set_float32_matmul_precision`, as are their
    gradients where `@linvit.recomputed` stands above. Not in compiled code; see `ieee_products`.

    Example:
        >>> class Cosine(linvit.Attention):
        ...     @linvit.full_precision
        ...     def forward(self, q, k, v, grid): ...
    """

    @functools.wraps(core)
    def run(self: Self, q: Tensor, k: Tensor, v: Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        dtype = v.dtype
        if not q.dtype == k.dtype == dtype == torch.float32:
            q, k, v = upcast(q), upcast(k), upcast(v)
        if q.is_meta:  # which has no autocast
            return core(self, q, k, v, *args, **kwargs).to(dtype)
        device = q.device
        with ieee_products(device):
            if torch.compiler.is_compiling() or torch.is_autocast_enabled(device.type):
                with torch.autocast(device.type, enabled=False):
                    return core(self, q, k, v, *args, **kwargs).to(dtype)
            return core(self, q, k, v, *args, **kwargs).to(dtype)

    return run


def ieee_products(device: torch.device) -> AbstractContextManager[None]:
    """A context in which products and convolutions of float32 tensors are IEEE float32, not TensorFloat-32 or bfloat16.

    TF32 keeps 10 bits of the factors: products are then off by 1e-3, and what is ill-conditioned by far more. torch's
    settings are global, and restored. Compiled code keeps them as they are, since torch cannot compile their change.
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
