"""Rotary position embeddings in two dimensions: pairs of channels rotate by angles that grow with row and column.

The first half of `width` channels turns with the row and the second with the column, in pairs of neighbours
`(x0 cos a - x1 sin a, x1 cos a + x0 sin a)`, with `width / 4` frequencies for each. So a product of a query and a key
depends on their offset. Tables are made from the grid of the call, prefix tokens turn by 0, and keys of another grid
than the queries (spatial reduction) have the positions of their patches on the grid of the queries.

Paper: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding"; in two dimensions as in RALA
(per head) and MLLA (over all channels).
"""

import functools
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.attention.declarations import Facts, Gate, Precision
from linvit.attention.ops.activations import elu_plus_one
from linvit.attention.ops.decorators import is_traced, supports_custom_autograd
from linvit.attention.ops.functional import upcast, wide
from linvit.attention.ops.linear import key_count, key_mean, key_product, like_tokens, mean_product, wide_product
from linvit.attention.ops.value_conv import ConvolvedAttention, value_conv
from linvit.attention.packed import Packed
from linvit.errors import UserError, check_number


def rotate(q: Tensor, k: Tensor, grid: Grid, *, width: int | None = None, last: bool = True) -> tuple[Tensor, Tensor]:
    """Queries (B, h, N, d) and keys (B, h, M, d) turned by their positions; see `rotate_tokens`."""
    return rotate_tokens(q, grid, width=width, last=last), rotate_tokens(k, grid, keys=True, width=width, last=last)


def rotate_tokens(x: Tensor, grid: Grid, *, keys: bool = False, width: int | None = None, last: bool = True) -> Tensor:
    """Queries, or keys, (B, h, N, d) turned by their positions, in their dtype.

    The frequencies run over `width` channels, a multiple of 4: d (None), a part of it, or, for even d, all `h * d`.
    They are `10000^-(i / (width / 4 - 1))`, from 1 to exactly 1/10000 (RALA, MALA, NaLaFormer); without the `last` they
    are `10000^-(i / (width / 4))` (MLLA).
    """
    return _turned(x, position_turns(x, grid, keys=keys, width=width, last=last))


def position_turns(
    x: Tensor, grid: Grid | Packed, *, keys: bool = False, width: int | None = None, last: bool = True
) -> Tensor:
    """Returns cosines and sines of `rotate_tokens`, (N, d / 2, 2), or (h, N, d / 2, 2) for a width of all heads."""
    width = x.shape[-1] if width is None else width
    if isinstance(grid, Packed):
        own = partial(position_turns, x, width=width, last=last)
        key = ("turns", width, last, x.shape[1], x.shape[3], wide(x), x.device)
        return grid.kept(key, lambda: torch.cat([turns for one, n in grid.groups for turns in [own(one)] * n], -3))  # type: ignore[no-any-return]
    size = grid.keys_size if keys else grid.size
    # Saves dozens of kernel launches on a GPU, for values that are always the same.
    turns = _kept_turns if x.is_cuda and type(x) is Tensor and not is_traced(x) else _turns
    return turns(grid.size, size, grid.num_prefix, width, last, x.shape[1], x.shape[3] // 2, wide(x), x.device)


def _turns(
    scale: tuple[int, int],
    size: tuple[int, int],
    num_prefix: int,
    width: int,
    last: bool,
    heads: int,
    pairs: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Computes the values of `position_turns`."""
    like = torch.empty(0, dtype=dtype, device=device)
    table = torch.stack(rotary_table(scale, size, num_prefix, width, last, like), dim=-1)
    if width <= 2 * pairs:
        return table.repeat(1, 2 * pairs // width, 1)
    per_head: Tensor = table.unflatten(1, (heads, pairs)).transpose(0, 1)
    return per_head.contiguous()


@functools.lru_cache(maxsize=16)
def _kept_turns(*args: Any) -> Tensor:
    """Returns the values of `position_turns`, cached for further calls."""
    with torch.inference_mode(False):
        return _turns(*args)


def rotary_table(
    scale: tuple[int, int], size: tuple[int, int], num_prefix: int, width: int, last: bool, like: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines of the angles, (num_prefix + H * W, width / 2) each, one for every pair of channels.

    Positions are counted in units of the grid `scale`; prefix tokens have the angle 0.
    """
    count = width // 4
    steps = torch.arange(count, dtype=like.dtype, device=like.device)
    frequencies = 10000.0 ** (-steps / max(count - 1 if last else count, 1))
    # Middles of patches: 0, 1, 2, ... on the grid of the scale itself.
    rows, columns = (
        ((torch.arange(side, dtype=like.dtype, device=like.device) + 0.5) * (units / side) - 0.5)[:, None] * frequencies
        for units, side in zip(scale, size, strict=True)
    )  # (H, count), (W, count)

    def spread(rows: Tensor, columns: Tensor, prefix: float) -> Tensor:
        """(H, count) and (W, count) -> (num_prefix + H * W, 2 count)."""
        pairs = [rows[:, None].expand(*size, -1), columns.expand(*size, -1)]
        return F.pad(torch.cat(pairs, dim=-1).flatten(0, 1), (0, 0, num_prefix, 0), value=prefix)

    return spread(rows.cos(), columns.cos(), 1.0), spread(rows.sin(), columns.sin(), 0.0)


def check_rotary(
    dim: int, num_heads: int, key_dim: int, *, multiple: int = 4, across: bool = False, option: str = "rotary=False"
) -> None:
    """Raises a `UserError` unless heads of `key_dim` channels can turn; `across` all heads even widths do."""
    if across and dim % 4 == num_heads % 2 == 0:
        multiple = 2
    if key_dim % multiple == 0:
        return
    heads = ", ".join(str(h) for h in range(1, dim // multiple + 1) if dim % (multiple * h) == 0)
    if key_dim * num_heads != dim:
        way = "Set key_dim to such a number"
    elif heads:
        way = f"Dim {dim} can be split into {heads} heads of such widths; choose one"
    else:
        way = "Make dim a multiple of 4"
    raise UserError(
        f"rotary position embeddings turn pairs of channels by row and by column, so queries and keys need a multiple "
        f"of {multiple} channels per head; dim {dim} with num_heads {num_heads} has {key_dim}. {way}, or set {option}"
    )


def rotary_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turns: tuple[Tensor | None, Tensor | None],
    eps: float,
    difference: float | None = None,
    grid: Grid | Packed | None = None,
) -> Tensor:
    """Returns linear attention on given features; only the numerator is rotated, by `turns` of queries and keys.

    With t = q mean(k) it is `rot(q) (rot(k)^T v / M) / (t + eps)`; with a `difference` s, and z = s t, it is MALA's
    `(1 + 1/(z + eps)) (s/M) rot(q) (rot(k)^T v) - z mean(v)`. (B, h, N, dk), (B, h, M, dk), (B, h, M, d).
    """
    if isinstance(grid, Packed):
        q, k, wide_v = upcast(q), upcast(k), upcast(v)
        scale, z = rotary_scale(mean_product(q, k, grid), key_count(k, grid), eps, difference)
        out = key_product(_turned(q, turns[0]), _turned(k, turns[1]), wide_v, grid) * scale
        return (out if z is None else out - z * key_mean(wide_v, grid)).to(v.dtype)
    if v.dtype == torch.bfloat16 and not torch.compiler.is_compiling() and supports_custom_autograd(q):
        return _RotaryAttention.apply(q, k, v, *turns, eps, difference)  # type: ignore[no-any-return]
    scale, z = rotary_scale(q @ k.mean(-2, keepdim=True).mT, k.shape[-2], eps, difference)
    q, k = _turned(q, turns[0]), _turned(k, turns[1])
    out = q @ (k.mT @ v) * scale
    return out if z is None else out.sub_(z * v.mean(-2, keepdim=True))


def rotary_scale(t: Tensor, count: int | Tensor, eps: float, difference: float | None) -> tuple[Tensor, Tensor | None]:
    """Returns the factor of the numerator of `rotary_attention`, and its z, (B, h, N, 1) each."""
    if difference is None:
        return (t + eps).reciprocal() / count, None
    z = t * difference
    return (1 + (z + eps).reciprocal()) * (difference / count), z


class _RotaryAttention(torch.autograd.Function):
    """`rotary_attention` in bfloat16. Products are rounded; their factors and summands are float32."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, turns_q: Tensor | None, turns_k: Tensor | None, *given: Any
    ) -> Tensor:
        ctx.given = given
        mean, v, out = k.mean(-2, keepdim=True), v.contiguous(), like_tokens(q, v.shape[-1])
        t = wide_product(q, mean.mT)
        scale, z = rotary_scale(t, k.shape[-2], *given)
        turned, k = _turned(q, turns_q), _turned(k, turns_k)
        numerator = wide_product(turned, sums := k.mT @ v)
        if z is None:
            mean_v = None
            torch.mul(numerator, scale, out=out)
        else:
            mean_v = v.mean(-2, keepdim=True)
            torch.addcmul(numerator.mul_(scale), z, mean_v, value=-1, out=out)
        ctx.save_for_backward(q, turned, k, v, sums, mean, mean_v, t, out, turns_q, turns_k)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, turned, k, v, sums, mean, mean_v, t, out, turns_q, turns_k = ctx.saved_tensors
        (eps, difference), count = ctx.given, k.shape[-2]
        scale, z = rotary_scale(t, count, eps, difference)
        of_numerator = torch.mul(gradient, scale, out=q.new_empty(out.shape))
        of_sums = turned.mT @ of_numerator
        of_v = k @ of_sums
        of_t = -(gradient * out).sum(-1, keepdim=True, dtype=t.dtype)  # times the derivative of the scale's logarithm
        if z is None:
            of_t /= t + eps
        else:
            of_z = wide_product(of_numerator, mean_v.mT) / scale  # by heads, as the gradient is not
            of_t = difference * ((of_t - z * of_z) / ((z + eps) * (z + eps + 1)) - of_z)
            of_v -= (z / scale).to(v.dtype).mT @ of_numerator / count
        of_mean = of_t.to(q.dtype).mT @ q
        of_q = torch.addcmul(_turned_back(of_numerator @ sums.mT, turns_q), of_t, mean, out=torch.empty_like(q))
        of_k = torch.add(_turned_back(v @ of_sums.mT, turns_k), of_mean, alpha=1 / count, out=torch.empty_like(k))
        return of_q, of_k, of_v, None, None, None, None


def _turned(x: Tensor, turns: Tensor | None) -> Tensor:
    """(B, h, N, d) with each pair of channels turned, contiguous per head; as it is without `turns`."""
    if turns is None:
        return x
    if torch.compiler.is_compiling():  # which has no complex numbers
        (first, second), (cos, sin) = _pairs(x).unbind(-1), turns.unbind(-1)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:  # one product: six times as fast as the products of strided halves
        turned = torch.view_as_real(torch.view_as_complex(_pairs(x)) * torch.view_as_complex(turns))
    return turned.flatten(3).to(x.dtype)


def _turned_back(x: Tensor, turns: Tensor | None) -> Tensor:
    """Undoes `_turned`, in at least float32; x as it is without `turns`."""
    if turns is None:
        return x
    return torch.view_as_real(torch.view_as_complex(_pairs(x)) * torch.view_as_complex(turns).conj()).flatten(3)


def _pairs(x: Tensor) -> Tensor:
    """(B, h, N, d) -> (B, h, N, d / 2, 2), contiguous per head, in at least float32."""
    return upcast(x).contiguous().unflatten(3, (-1, 2))  # type: ignore[no-any-return]


class RotaryLinearAttention(ConvolvedAttention):
    """Base class of rala, mala, nala, mlla and pola_pp: linear attention whose numerator is rotated.

    `o = rot(Q) (rot(K)^T v / M) / (Q mean K + eps) + lepe(v)` for features Q and K of the queries and keys, `elu + 1`
    unless a subclass has others, beside a depthwise convolution of the values.

    Args:
        rotary: Rotate the features in the numerator only; `key_dim` must then be a multiple of 4.
        lepe_kernel: Side of the depthwise kernel of the values, odd; 0 leaves the convolution out.
        gate: Factor of the output, by the host: "linear" a projection of the layer's input, "silu" SiLU of one,
            "none" nothing.
        eps: Added to the denominator.
    """

    facts = Facts(complexity="O(N)", packs=True)
    precision: ClassVar[Precision] = "mixed"
    convolution = "lepe"
    feature_ratio = 1  # features per channel of q and k
    extra_rank = 0  # of the matrix, beside that of the features
    width_multiple = 4  # divisor of the channels of q and k per head under rotation

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        rotary: bool = True,
        lepe_kernel: int = 5,
        gate: Gate = "linear",
        eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("eps", eps, at_least=0)
        if rotary:
            check_rotary(dim, num_heads, self.key_dim, multiple=self.width_multiple)
        self.eps = eps
        self.lepe = value_conv("lepe_kernel", dim, lepe_kernel)
        self.declare(
            rotary=rotary,
            gate=gate,
            channelwise=self.lepe is not None,
            max_rank=self.feature_ratio * self.key_dim + self.extra_rank,
        )

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        if not q.is_cuda:  # contiguous per head, once for all that follows
            q, k = q.contiguous(), k.contiguous()
        q, k = self.features(q, k, grid)
        return rotary_attention(q, k, v, self.turns(q, k, grid), self.eps, self.difference, grid)

    @property
    def difference(self) -> float | None:
        """That of `rotary_attention`."""
        return None

    def features(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Features Q (B, h, N, r) and K (B, h, M, r) before rotation: `elu + 1` of the entries."""
        return elu_plus_one(q), elu_plus_one(k)

    def rotated(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Returns features rotated by their positions."""
        of_q, of_k = self.turns(q, k, grid)
        return _turned(q, of_q), _turned(k, of_k)

    def frequencies(self) -> dict[str, Any]:
        """Returns options of `rotate_tokens`."""
        return {}

    def turns(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor | None, Tensor | None]:
        """Returns the `position_turns` of both; None without rotation."""
        if not self.facts.rotary:
            return None, None
        options = self.frequencies()
        return position_turns(q, grid, **options), position_turns(k, grid, keys=True, **options)

    def core_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Factors (B, h, N, r), (B, h, M, r) of the linear attention."""
        q, k = self.features(q, k, grid)
        denominator = q @ k.mean(-2, keepdim=True).mT + self.eps
        q, k = self.rotated(q, k, grid)
        return q / denominator, k / k.shape[-2]
