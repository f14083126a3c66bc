"""Formula of linear attention that the kernels compute."""

import os
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from linvit.attention.packed import Packed
from linvit.errors import UserError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton runs its programs on the CPU with numpy, to test them."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 128  # channels of a head
Phi = Literal["elu", "relu", "focused", "exp", "softmax"]


class Formula(NamedTuple):
    """Linear attention `o = R_q (R_k^T v) / (F_q sum F_k + eps)`: F = phi(x) are features, R the same after rotation.

    Attributes:
        phi: "elu" is elu(x) + 1; "relu" is `u = relu(x) + relu_eps`; "focused" FLatten's `||u|| u^p / ||u^p||`; "exp"
            is exp(x), without overflow, for `eps` 0; "softmax" that of queries over their channels and of keys over
            the tokens, without a denominator (Efficient Attention).
        power: p of "focused", at least 1.
        all_heads: Norms of "focused" run over all heads together, not over each.
        factor: Multiplies u of "focused", by channel: (h dk,).
        shift: Is added to the keys first: (M, h dk).
        weights: Multiply the features of the keys: (B, h, M).
        turns: Cosines and sines for pairs of neighbouring channels of q and of k, (N, dk / 2, 2) or (h, N, dk / 2, 2).
            They turn the numerator alone.
        difference: s of MALA's `(1 + 1/(z + eps)) (s/M) R_q (R_k^T v) - z mean(v)` with `z = (s/M) F_q sum F_k`; 0 is
            the quotient.
        mean: Both sums over the keys are means: `eps` weighs M times as much.
    """

    phi: Phi
    eps: float = 0.0
    relu_eps: float = 0.0
    power: float = 1.0
    all_heads: bool = True
    factor: Tensor | None = None
    shift: Tensor | None = None
    weights: Tensor | None = None
    turns: tuple[Tensor | None, Tensor | None] = (None, None)
    difference: float = 0.0
    mean: bool = False


def kernel_lacks(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Returns the supported inputs if the kernels do not support q, k and v of (B, h, N, d)."""
    if not (v.is_cuda or INTERPRETED):
        return f"tensors of a CUDA device, not of {v.device}"
    if v.dtype not in DTYPES:
        return f"float32, bfloat16 and float16, not {str(v.dtype).removeprefix('torch.')}"
    if max(q.shape[-1], v.shape[-1]) > WIDEST:
        return f"heads of at most {WIDEST} channels, not {max(q.shape[-1], v.shape[-1])}"
    if not (q.numel() and k.numel() and v.numel()):
        return f"at least one image, query and key, not shapes {[*q.shape]} and {[*k.shape]}"
    return None


def _check(q: Tensor, k: Tensor, v: Tensor, formula: Formula, packed: Packed | None) -> None:
    """Raises a `UserError` for an unknown phi, and for shapes with which a kernel would read beyond a tensor."""
    if formula.phi not in get_args(Phi):
        raise UserError(f"phi is one of {', '.join(get_args(Phi))}; got {formula.phi!r}")
    if formula.phi == "focused" and not formula.power >= 1:
        raise UserError(f"the power of focused features is at least 1; got {formula.power}")
    (batch, heads, queries, width), keys = q.shape, k.shape[2]
    if packed is not None and (batch, queries, keys) != (1, *[packed.num_queries] * 2):
        raise UserError(f"{packed} has rows (1, h, {packed.num_queries}, d); got q {[*q.shape]} and k {[*k.shape]}")
    given = {
        "k": (k, (batch, heads, keys, width)),
        "v": (v, (batch, heads, keys, v.shape[-1])),
        "weights": (formula.weights, (batch, heads, keys)),
        "shift": (formula.shift, (keys, heads * width)),
        "factor": (formula.factor, (heads * width,)),
        "turns of q": (formula.turns[0], (queries, width // 2, 2)),
        "turns of k": (formula.turns[1], (keys, width // 2, 2)),
    }
    for name, (x, shape) in given.items():
        if x is not None and x.shape != shape and not (name.startswith("turns") and x.shape == (heads, *shape)):
            raise UserError(f"linear attention of queries {[*q.shape]} takes {name} {[*shape]}; got {[*x.shape]}")


def linear_attention(q: Tensor, k: Tensor, v: Tensor, formula: Formula, packed: Packed | None = None) -> Tensor:
    """Returns the formula by Triton on a GPU: (B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d) in v's dtype.

    float32, bfloat16 or float16, dk and d up to 128. Features, products and sums are float32; in half precision the
    factors are TensorFloat-32. For the backward pass it stores q, k, v, and `dk (d + 1)` sums per head. There are no
    second derivatives. Of `Packed` images q, k and v are rows (1, h, T, d), and each image has its own sums.

    Raises:
        UserError: For inputs that `kernel_lacks` rejects, and for a phi or shapes that `Formula` does not allow.
    """
    from linvit.attention.kernels.linear import attention

    if (lack := kernel_lacks(q, k, v)) is not None:
        raise UserError(f"the kernels of linear attention take {lack}; compute the formula with torch's operators")
    _check(q, k, v, formula, packed)
    q, k, v = (x.to(v.dtype) for x in (q, k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    extras = (*formula.turns, formula.weights, formula.shift, formula.factor)
    tensors = (None if x is None else x.float().contiguous() for x in extras)
    groups = 1 if formula.all_heads else q.shape[1]
    numbers = [formula.power, float(groups), formula.difference, formula.eps, formula.relu_eps, float(formula.mean)]
    return attention(packed, q, k, v, *tensors, formula.phi, numbers)
