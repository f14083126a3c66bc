"""Products of matrices per head, (B, h, n, m) @ (B, h, m, p), on heads as a host splits them.

A host's heads lie side by side in memory, token by token. torch's `matmul` copies such heads apart first, and its
result has to be copied back when heads are joined. On a CPU that is as much time as the product of an O(N) attention.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from linvit.attention.ops.recompute import transformed

LEAST = {1: 2**14, 2: 2**17}
"""Entries of an image's heads from which on a call of its own costs less than the copies, by the number of threads.

More threads share the matrices of all images better; with more than 2, where nothing was measured, torch multiplies.
"""


def matmul(a: Tensor, b: Tensor, by_image: bool | None = None) -> Tensor:
    """`a @ b` of (B, h, n, m) and (B, h, m, p) without copies, (B, h, n, p).

    It multiplies image by image, in 0.6 of `a @ b`'s time for heads that lie side by side; so do its result, like a,
    and its gradients, like a and b. That is for CPUs and one or two threads: elsewhere, in compiled code, under
    autocast, and for heads that are small or contiguous, it is `a @ b`. Who has asked `side_by_side` says `by_image`.
    """
    if side_by_side(a) or side_by_side(b) if by_image is None else by_image:
        return _product(a, b, like=a)
    # A transposed product where a is transposed: the gradient of a is then laid out like a.
    return a @ b if a.stride(-1) == 1 else (b.mT @ a.mT).mT


def side_by_side(x: Tensor) -> bool:
    """Whether x, (B, h, N, d) or transposed, has the heads of a token side by side, and `matmul` takes it like this.

    What several products are to get is otherwise made contiguous per head, once for all.
    """
    return (
        x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None  # in which shapes are no numbers
        and x.shape[0] > 1 < x.shape[1]
        and x.stride(0) != x.stride(1) * x.shape[1]
        and x[0].numel() >= LEAST.get(torch.get_num_threads(), math.inf)
        and not torch.is_autocast_enabled("cpu")
        and not transformed(x)
    )


def _product(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    batched = is_batchedtensor(a) or is_batchedtensor(b) or is_legacy_batchedtensor(a) or is_legacy_batchedtensor(b)
    if batched:  # many gradients at once
        return a @ b
    apart = like.stride(1) > max(like.stride(2), like.stride(3))
    recorded = torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)
    return _Product.apply(a, b, apart) if recorded else _by_image(a, b, apart)


def _by_image(a: Tensor, b: Tensor, apart: bool) -> Tensor:
    """`a @ b` with heads apart in memory or side by side."""
    batch, heads, rows, columns = *a.shape[:3], b.shape[3]
    strides = (rows * columns, columns) if apart else (columns, heads * columns)  # of heads, of rows
    out = a.new_empty_strided((batch, heads, rows, columns), (heads * rows * columns, *strides, 1))
    for left, right, result in zip(a.unbind(), b.unbind(), out.unbind(), strict=True):
        torch.bmm(left, right, out=result)
    return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, apart: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        return _by_image(a, b, apart)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Each gradient is laid out like what it is of."""
        a, b = ctx.saved_tensors
        of_a = of_b = None
        if ctx.needs_input_grad[0]:
            transposed = a.stride(-1) != 1
            of_a = _product(b, gradient.mT, a).mT if transposed else _product(gradient, b.mT, a)
        if ctx.needs_input_grad[1]:
            transposed = b.stride(-1) != 1
            of_b = _product(gradient.mT, a, b).mT if transposed else _product(a.mT, gradient, b)
        return of_a, of_b, None
