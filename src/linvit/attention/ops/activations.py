"""Feature maps, some with a hand-written gradient that reads memory less often than that of their operations.

Share of a training step that such a gradient saves on a CPU (one thread, float32, 224 pixels): that of `elu + 1` 4 to
11 % of DeiT-T with linear attention, that of f_p and of what precedes it 3 to 6 % of DeiT-T and FLatten-Swin-T, that of
signed powers 5 to 10 % of DeiT-T with `pola`. Those of unit vectors and of cosines save nothing there; on a GPU, where
bytes decide, a layer of 56 x 56 tokens in bfloat16 moves 19 to 24 % fewer with the former (`taylor`, `additive`,
`linear_angular`) and 31 % fewer with the latter (`xca`), as `tests/null_cuda/layers.py` counts them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import functional as F

from linvit.attention.ops.decorators import supports_custom_autograd
from linvit.attention.ops.functional import safe_norm, upcast, wide


def elu_plus_one(x: Tensor) -> Tensor:
    """Returns `elu(x) + 1`, as `exp(x)` below 0, because the float32 sum has no correct digit below -16."""
    if torch.is_grad_enabled() and supports_custom_autograd(x):
        return _EluPlusOne.apply(x)  # type: ignore[no-any-return]
    return F.relu(x) + x.clamp_max(0).exp()  # the derivative at 0 is that of the second term, 1


def normalize(
    x: Tensor, eps: float, order: float = 2, dims: tuple[int, ...] = (-1,), dtype: torch.dtype | None = None
) -> Tensor:
    """Returns vectors of length one, `x / max(||x||, eps)`, with norms of the given order over `dims`.

    A vector of zeros stays zero at any eps and passes its gradient on unchanged; the quotient would divide it by eps.
    `dtype` is that of the norms; the vectors keep theirs.
    """
    if order == 2 and x.requires_grad and supports_custom_autograd(x):
        return _Unit.apply(x, eps, dims, dtype)  # type: ignore[no-any-return]
    return (x / safe_norm(x, eps, order, dims, dtype)).to(x.dtype)


def of_both(phi: Callable[[Tensor], Tensor], q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `phi(q)` and `phi(k)`, on a GPU in one pass, and contiguous, if they have one shape and need a copy."""
    if q.is_cuda and q.shape == k.shape and not q.is_contiguous():
        q, k = phi(torch.stack([q, k])).unbind()
        return q, k
    return phi(q), phi(k)


def focus(x: Tensor, power: float) -> Tensor:
    """Computes `f_p(x) = ||x|| x^p / ||x^p||` (FLatten, Eq. 5) of features x >= 0 (..., C), L2 norms.

    Dividing by the largest entry first changes nothing but keeps x^p from under- and overflowing at any p.
    """
    powers, scale, _ = focused_powers(x, power)
    return powers * scale


def trains_by_hand(x: Tensor) -> bool:
    """True if `focused` is to be called: without a gradient, or compiled, `focus` is quicker."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling() and supports_custom_autograd(x)


def focused(
    xs: Sequence[Tensor],
    shift: Tensor | None,
    factor: Tensor,
    eps: float,
    power: float,
    all_heads: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """`f_p((relu(x) + eps) * factor)` of tokens x (B, N, h, d) of one shape, in `dtype`, on a GPU contiguous per head.

    `shift` (1, N, h, d) is added to the last of them first. It and `factor` (h, d), which is positive, have the dtype
    to compute in. Norms run over d, or over all heads.
    """
    return _Focused.apply(shift, factor, eps, power, all_heads, dtype, *xs)  # type: ignore[no-any-return]


def _focused(
    xs: Sequence[Tensor], shift: Tensor | None, factor: Tensor, eps: float, power: float, all_heads: bool
) -> list[Tensor]:
    """Returns the formula of `focused`."""
    low = _vectors(factor, all_heads)

    def phi(x: Tensor, shift: Tensor | None) -> Tensor:
        x = _vectors(x, all_heads) if shift is None else _vectors(x, all_heads) + _vectors(shift, all_heads)
        x = torch.addcmul(eps * low, F.relu(x.to(low.dtype)), low)
        return focus(x, power).reshape(*x.shape[:2], *factor.shape)

    return [*(phi(x, None) for x in xs[:-1]), phi(xs[-1], shift)]


def _vectors(x: Tensor, all_heads: bool) -> Tensor:
    """(..., h, d) as it is, or of all heads, (..., h d)."""
    return x.flatten(-2) if all_heads else x


def focused_powers(x: Tensor, power: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns powers of x (..., C), the factor that gives them the norm of x, and that norm, (..., 1)."""
    tiny = torch.finfo(x.dtype).tiny
    # The largest power becomes 2^30, not 1: otherwise squares of small powers are denormal numbers, which are slow.
    unit = (x.detach().amax(-1, keepdim=True) * 2 ** (-30 / power)).clamp_min(tiny)
    x = x / unit
    powered, norm = x.pow(power), vector_norm(x, dim=-1, keepdim=True) * unit
    return powered, norm / vector_norm(powered, dim=-1, keepdim=True).clamp_min(tiny), norm


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
"""Feature maps by name."""


def signed_powers(x: Tensor, power: Tensor) -> Tensor:
    """`|x|^p` of x (..., d) by its sign, (..., 2 d), with p >= 1 that broadcasts."""
    if x.requires_grad and supports_custom_autograd(x):
        return _SignedPowers.apply(x, power)  # type: ignore[no-any-return]
    return by_sign(x.abs() ** power, x)


def by_sign(sizes: Tensor, x: Tensor) -> Tensor:
    """Returns sizes of the entries of x, (..., d), in the first half of (..., 2 d) if positive, else in the second."""
    first = sizes * F.relu(x.detach().sign())  # products: several times as fast as masks on a CPU
    return torch.cat([first, sizes - first], dim=-1)


class _EluPlusOne(torch.autograd.Function):
    """Its derivative is `min(y, 1)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if x.is_cuda and not torch.compiler.is_compiling():  # heads come together without an additional pass
            y = torch.clamp_max(x, 0, out=x.new_empty(x.shape)).exp_().add_(F.relu(x))
        else:
            y = F.relu(x).add_(x.clamp_max(0).exp_())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y.clamp_max(1)  # type: ignore[no-any-return]


class _Focused(torch.autograd.Function):
    """With z = (relu(x) + eps) factor and y = f_p(z), of the same norm, the gradient g becomes of_z.

    `z of_z = p y (g - y (g y) / ||z||^2) + z^2 (g y) / ||z||^2`.
    """

    @staticmethod
    def forward(ctx: Any, shift: Tensor | None, factor: Tensor, *given: Any) -> tuple[Tensor, ...]:
        eps, power, all_heads, dtype, *xs = given
        least, (batch, tokens, heads, width) = eps * factor, xs[0].shape
        z = factor.new_empty(len(xs), batch, tokens, heads, width)
        added = [least] * (len(xs) - 1) + [least if shift is None else (shift + eps) * factor]
        for x, offset, out in zip(xs, added, z, strict=True):
            torch.addcmul(offset, x, factor, out=out)
        powers, scale, norm = focused_powers(_vectors(z.clamp_min_(least), all_heads), power)
        if all_heads:
            scale, norm = scale.unsqueeze(-1), norm.unsqueeze(-1)
        y = torch.empty_like(z, dtype=dtype)
        if y.is_cuda:
            y = y.view(len(xs), batch, heads, tokens, width).transpose(2, 3)
        torch.mul(powers.view_as(z), scale, out=y)
        ctx.given, ctx.dtype = (eps, power, all_heads), xs[0].dtype
        # Half precision has no second derivatives.
        ctx.save_for_backward(z, y, norm, shift, factor, *(xs if ctx.dtype == z.dtype else ()))
        return y.unbind()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        z, y, norm, shift, factor, *xs = ctx.saved_tensors
        (eps, power, all_heads), needed = ctx.given, ctx.needs_input_grad
        if torch.is_grad_enabled():  # the gradients are differentiated again
            places = (shift, factor, None, None, None, None, *xs)
            wanted = [x for x, wants in zip(places, needed, strict=True) if wants]
            again = _focused(xs, shift, factor, *ctx.given)
            found = iter(torch.autograd.grad(again, wanted, gradients, create_graph=True))
            return tuple(next(found) if wants else None for wants in needed)
        gradient = torch.stack(gradients)  # by tokens, as z
        norm = norm.clamp_min(torch.finfo(norm.dtype).tiny)
        along = (gradient * y).sum((-2, -1) if all_heads else -1, keepdim=True, dtype=z.dtype) / norm / norm
        of_z = torch.addcmul(gradient, y, along, value=-1).mul_(y)
        of_z.addcmul_(z * along, z, value=1 / power)  # times z / p, which the division below compensates
        of_factor = of_z.sum((0, 1, 2)) * power / factor if needed[1] else None
        # Entries that relu has cut off are divided by infinity.
        shares = F.threshold(z / (factor * power), eps / power * (1 + 8 * torch.finfo(z.dtype).eps), math.inf, True)
        narrow = ctx.dtype != z.dtype
        of_xs = torch.div(of_z, shares, out=torch.empty_like(z, dtype=ctx.dtype)) if narrow else of_z.div_(shares)
        of_shift = of_xs[-1].sum(0, keepdim=True, dtype=z.dtype) if needed[0] else None
        return of_shift, of_factor, None, None, None, None, *of_xs


class _SignedPowers(torch.autograd.Function):
    """Its gradient is `p y / x` of the half in which x is, and that of the power `y log |x|`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, power: Tensor) -> Tensor:
        powers = x.abs().pow_(power)
        ctx.save_for_backward(x, power, powers)
        return by_sign(powers, x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        x, power, powers = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is differentiated again
            powers = x.abs() ** power
        (first, second), sign = gradient.chunk(2, -1), x.sign()
        along = torch.lerp(second, first, F.relu(sign)).mul_(powers)  # as `by_sign` does
        size = x.abs().clamp_min(torch.finfo(x.dtype).tiny)
        of_power = (along * size.log()).sum_to_size(power.shape) if ctx.needs_input_grad[1] else None
        return along * power / size * sign, of_power


class _Unit(torch.autograd.Function):
    """Its gradient is `(g - y (y g)) / n`, and `g / n` where the norm n is a constant."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, *given: Any) -> Tensor:
        ctx.given = eps, 2, *given
        norm = safe_norm(x, *ctx.given)
        compiled = torch.compiler.is_compiling()  # then `out` breaks the graph, and the cast needs no separate pass
        y = (x / norm).to(x.dtype) if compiled else torch.div(x, norm, out=torch.empty_like(x))
        ctx.save_for_backward(x, y, norm)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, y, norm = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is differentiated again
            norm = safe_norm(x, *ctx.given)
        eps, _, dims, _ = ctx.given
        along = (gradient * y).sum(dims, keepdim=True) * (norm > eps)
        return (torch.addcmul(gradient, y, along, value=-1) / norm).to(x.dtype), None, None, None


def cosines(q: Tensor, k: Tensor, eps: float) -> Tensor:
    """Products of channels of q and k (B, h, N, d) brought to length 1 over the tokens, (B, h, d, d)."""
    both = torch.stack([q, k])
    if both.requires_grad and supports_custom_autograd(q) and not torch.compiler.is_compiling():
        return _Cosines.apply(both, eps)  # type: ignore[no-any-return]
    return _cosines(both, eps)[0]


def _cosines(both: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Of (2, B, h, N, d), and the norms (2, B, h, 1, d)."""
    norms = safe_norm(both, eps, 2, (-2,), wide(both))
    return upcast(both[0].mT @ both[1]) / (norms[0].mT * norms[1]), norms


class _Cosines(torch.autograd.Function):
    """Its gradient takes few passes over the tokens: that of a norm is a multiple of its channel."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, eps: float) -> Tensor:
        found, norms = _cosines(both, eps)
        ctx.eps = eps
        ctx.save_for_backward(both, found, norms)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        both, found, norms = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient is differentiated again
            return torch.autograd.grad(_cosines(both, ctx.eps)[0], both, gradient, create_graph=True)[0], None
        along = gradient * found
        shares = torch.stack([along.sum(-1).unsqueeze(-2), along.sum(-2, keepdim=True)]) * (norms > ctx.eps)
        of_both = torch.mul(both, shares / -norms.square(), out=torch.empty_like(both))
        product = (gradient / (norms[0].mT * norms[1])).to(both.dtype).flatten(0, 1)
        (q, k), (of_q, of_k) = both.flatten(1, 2), of_both.flatten(1, 2)
        of_q.baddbmm_(k, product.mT)
        of_k.baddbmm_(q, product)
        return of_both, None
