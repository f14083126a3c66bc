"""Nystrom attention: `o = softmax(s q kt^T) pinv(softmax(s qt kt^T)) softmax(s qt k^T) v`, `s = dk^-1/2`.

The landmarks qt and kt are m means of queries and of keys; a few steps of an iteration approximate the pseudo-inverse.

Paper: Xiong et al. 2021, "Nystromformer: A Nystrom-Based Algorithm for Approximating Self-Attention".
Cost: `(N + M + m) (h dk + C) m + 4 T h m^3 + s N C` MACs for T steps and a convolution of length s, linear in N if m is
fixed. Rank: at most m (N with the convolution).

The iteration is part of the definition: after 6 steps it is often far from the pseudo-inverse. Where the landmarks are
all queries or all keys, plain softmax attention costs no more and is used instead.
"""

import math
import operator
from typing import Literal, cast

import torch
from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.value_conv import ConvolvedAttention, check_side, convolve_sequence
from linvit.errors import UserError, check_number

DEFAULT_NUMBER = 64  # of landmarks


class NystromAttention(ConvolvedAttention):
    """Softmax attention through m landmarks, O(N m d).

    Args:
        grid: Nominal grid (checked against `num_landmarks`; nothing here has a fixed length).
        num_landmarks: Landmarks m, at most the number of queries and of keys. None takes 64, or as many as the grid
            allows.
        pinv_iters: Steps of the pseudo-inverse.
        init: Where the iteration starts: `K^T / c` for the kernel K between landmarks, with c the largest column sum of
            the same sample and head ("exact") or of the whole batch ("original", the reference's default: a sample then
            depends on its neighbours).
        conv_kernel: Length s of a convolution of v along the sequence, added to the output; odd, 0 is none. One kernel
            per head, shared by its channels. Prefix tokens are part of the sequence. Not for keys of another grid.
        landmarks: "segment": means of consecutive tokens, prefix tokens included; "pool2d": means of the blocks of an
            a x b division of the grid, a b = m, with blocks as square as can be; prefix tokens stay out.
        uneven: Where m does not divide the tokens: "t2t" makes the first parts one token shorter than the last
            (T2T-ViT); "error" raises a `UserError`.
    """

    facts = Facts(complexity="O(N)")
    convolution = "conv"
    depthwise = False
    exports_any_size = False  # how many landmarks there are, and of how many tokens each, follows from the grid

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        num_landmarks: int | None = None,
        pinv_iters: int = 6,
        init: Literal["exact", "original"] = "exact",
        conv_kernel: int = 0,
        landmarks: Literal["segment", "pool2d"] = "segment",
        uneven: Literal["t2t", "error"] = "t2t",
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("pinv_iters", pinv_iters, at_least=0, whole=True)
        check_side("conv_kernel", conv_kernel, "33 or 35")
        self.pinv_iters = pinv_iters
        self.init = init
        if num_landmarks is not None:
            check_number("num_landmarks", num_landmarks, at_least=1, whole=True, note=", or null for a default")
        self.num_landmarks = num_landmarks
        self.pool = landmarks == "pool2d"
        self.even = uneven == "error"
        self.core_rank(grid)  # raises if they do not fit
        self.declare(same_grid=conv_kernel > 0)
        self.conv = None
        if conv_kernel:
            shape, padding = (conv_kernel, 1), (conv_kernel // 2, 0)
            self.conv = nn.Conv2d(num_heads, num_heads, shape, padding=padding, groups=num_heads, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d).

        A mask (B, N) has 1 for a token and 0 for padding, which no query sees; only for keys of the queries' grid.
        """
        if mask is not None and grid.keys_size != grid.size:
            raise UserError(
                f"nystrom with a mask needs keys of the queries' grid; got queries of {grid.size[0]}x{grid.size[1]}, "
                f"keys of {grid.keys_size[0]}x{grid.keys_size[1]}. Leave the mask out, or use sr_ratio=1 and sr_pool=0"
            )
        kept = None if mask is None else mask[:, None, :, None].to(v.dtype)  # (B, 1, N, 1)
        out = self.core(q, k, v, grid, kept)
        if self.conv is None:
            return out
        return out + self.convolved(v if kept is None else v * kept, grid)

    def convolved(self, v: Tensor, grid: Grid) -> Tensor:
        """Returns the convolution of the values along the sequence of tokens, (B, h, N, d) -> (B, h, N, d)."""
        return convolve_sequence(cast("nn.Conv2d", self.conv), v)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, kept: Tensor | None = None) -> Tensor:
        """Returns the attention through landmarks."""
        parts = self._kernels(q, k, grid, kept)
        if len(parts) == 1:
            return parts[0] @ v
        left, middle, right = parts
        return left @ (self._pinv(middle) @ (right @ v))

    def _kernels(self, q: Tensor, k: Tensor, grid: Grid, kept: Tensor | None = None) -> tuple[Tensor, ...]:
        """Row-wise softmax of `s q kt^T`, `s qt kt^T`, `s qt k^T`; or of `s q k^T` where all tokens are landmarks."""
        scale, hidden = self.key_dim**-0.5, None
        if kept is not None:
            kept = kept.to(q.dtype)
            q, k = q * kept, k * kept
            hidden = -1e9 * (1 - kept.mT)  # (B, 1, 1, M)

        def over_keys(logits: Tensor) -> Tensor:
            return (logits if hidden is None else logits + hidden).softmax(-1)

        count = self.core_rank(grid)
        if count == min(grid.num_queries, grid.num_keys):
            return (over_keys(q @ k.mT * scale),)
        qt, kt = self._means(q, count, grid.size, grid) * scale, self._means(k, count, grid.keys_size, grid)
        return (q @ (kt * scale).mT).softmax(-1), (qt @ kt.mT).softmax(-1), over_keys(qt @ k.mT)

    def _means(self, x: Tensor, count: int, size: tuple[int, int], grid: Grid) -> Tensor:
        """Returns landmarks (B, h, m, dk) of tokens (B, h, N, dk) whose patches are of an H x W grid."""
        blocks = division(count, size, self.even) if self.pool else None
        if blocks is None:
            return segment_means(x, count)
        plane = x[:, :, grid.num_prefix :].unflatten(2, size)
        return segment_means(segment_means(plane, blocks[1], dim=3), blocks[0]).flatten(2, 3)

    def _pinv(self, kernel: Tensor) -> Tensor:
        """Returns the pseudo-inverse of (B, h, m, m), by an iteration of third order."""
        column_sums = kernel.sum(-2, keepdim=True)  # (B, h, 1, m)
        largest = column_sums.amax(-1, keepdim=True) if self.init == "exact" else column_sums.amax()
        inverse, matrices = (kernel.mT / largest).flatten(0, 1), kernel.flatten(0, 1)  # (B h, m, m)
        for _ in range(self.pinv_iters):  # Y (13 - x (15 - x (7 - x))) / 4 for x = K Y
            x = matrices @ inverse
            polynomial = torch.baddbmm(x, x, x, beta=7, alpha=-1)
            polynomial = torch.baddbmm(x, x, polynomial, beta=15, alpha=-1)
            inverse = torch.baddbmm(inverse, inverse, polynomial, beta=13 / 4, alpha=-1 / 4)
        return inverse.view_as(kernel)

    def core_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """`softmax(q kt^T) pinv(...)` and `softmax(qt k^T)^T`; None where m is all tokens."""
        parts = self._kernels(q, k, grid)
        if len(parts) == 1:
            return None
        left, middle, right = parts
        return left @ self._pinv(middle), right.mT

    def core_rank(self, grid: Grid) -> int:
        """Returns the number of landmarks on a grid, the same for queries and keys.

        Raises:
            UserError: If the grid has fewer tokens than `num_landmarks`, or they cannot be divided as asked for.
        """
        most = min(grid.num_queries, grid.num_keys) - (grid.num_prefix if self.pool else 0)
        count = self.num_landmarks or min(DEFAULT_NUMBER, most)
        while self.num_landmarks is None and self.pool and not self.even and not self._divides(count, grid):
            count -= 1  # 1 divides all
        if count <= most and self._divides(count, grid):
            return count
        queries, keys = ("x".join(map(str, size)) for size in (grid.size, grid.keys_size))
        where = f"a grid of {queries} (keys {keys}) patches and {grid.num_prefix} prefix tokens"
        if count > most:
            raise UserError(
                f"num_landmarks {count} is more than the {most} tokens for them on {where}; use at most {most}"
            )
        parts = f"{'blocks' if self.pool else 'segments'}{' of equal size' if self.even else ''}"
        fitting = ", ".join(str(m) for m in range(1, most + 1) if self._divides(m, grid))
        raise UserError(f"{where} cannot be divided into num_landmarks {count} {parts}; these numbers can: {fitting}")

    def _divides(self, count: int, grid: Grid) -> bool:
        """Returns True if queries and keys can be divided into this number of parts, as the options ask for."""
        if self.pool:
            return None not in [division(count, size, self.even) for size in (grid.size, grid.keys_size)]
        return not (self.even and (grid.num_queries % count or grid.num_keys % count))


def segment_means(x: Tensor, count: int, dim: int = 2) -> Tensor:
    """Returns means over `count` consecutive segments of one dimension; the later are longer, if any are."""
    length = x.shape[dim]
    size = length // count
    shorter = (size + 1) * count - length  # segments of `size`; the others have `size + 1`
    first, last = x.split([shorter * size, length - shorter * size], dim)
    means: Tensor = first.unflatten(dim, (shorter, size)).mean(dim + 1)
    if shorter < count:
        means = torch.cat([means, last.unflatten(dim, (count - shorter, size + 1)).mean(dim + 1)], dim)
    return means


def division(count: int, size: tuple[int, int], even: bool) -> tuple[int, int] | None:
    """Returns the squarest division of an H x W grid into `count` blocks; `even`: of equal size. None without one."""
    height, width = map(operator.index, size)  # one graph per grid: torch.compile takes minutes for symbolic sizes
    ways = [(rows, count // rows) for rows in range(1, min(count, height) + 1) if count % rows == 0]
    ways = [(a, b) for a, b in ways if b <= width and not (even and (height % a or width % b))]
    return min(ways, key=lambda way: abs(math.log(height * way[1] / (width * way[0]))), default=None)
