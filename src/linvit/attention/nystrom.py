"""Nystrom attention: `o = softmax(q kt^T) pinv(softmax(qt kt^T)) softmax(qt k^T) v`, q and k divided by dk^(1/4).

The landmarks qt and kt are m means of queries and of keys; a few steps of an iteration stand for the pseudo-inverse.

Paper: Xiong et al. 2021, "Nystromformer: A Nystrom-Based Algorithm for Approximating Self-Attention".
Cost: `(N + M + m) (h dk + C) m + 4 T h m^3 + s N C` MACs for T steps and a convolution of length s, linear in N if m is
fixed. Rank: at most m (N with the convolution).

The iteration is part of the definition: after 6 steps it is often far from the pseudo-inverse. Where the landmarks are
all queries or all keys, plain softmax attention costs no more and takes its place.
"""

from typing import Literal, cast

import torch
from torch import Tensor, nn

from linvit.attention.base import Grid
from linvit.attention.ops.head_conv import check_side, convolve_sequence
from linvit.attention.ops.landmarks import Landmarks
from linvit.attention.ops.parts import ConvolvedAttention
from linvit.attention.ops.precision import full_precision
from linvit.attention.ops.recompute import recomputed
from linvit.errors import UserError, check_number


class NystromAttention(ConvolvedAttention):
    """Softmax attention through m landmarks, O(N m d).

    Args:
        dim, num_heads, key_dim: See `linvit.Attention`.
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

    complexity = "O(N)"
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
        self.landmarks = Landmarks(num_landmarks, landmarks, uneven)
        self.landmarks.count(grid)  # raises if they do not fit
        self.fewer_keys = not conv_kernel
        self.conv = None
        if conv_kernel:
            shape, padding = (conv_kernel, 1), (conv_kernel // 2, 0)
            self.conv = nn.Conv2d(num_heads, num_heads, shape, padding=padding, groups=num_heads, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d).

        Args:
            q: Queries.
            k: Keys.
            v: Values.
            grid: Their grid.
            mask: (B, N), 1 for a token and 0 for padding, which no query sees; only for keys of the queries' grid.
        """
        if mask is not None and grid.keys_size != grid.size:
            raise UserError(
                f"nystrom with a mask needs keys of the queries' grid; got queries of {grid.size[0]}x{grid.size[1]}, "
                f"keys of {grid.keys_size[0]}x{grid.keys_size[1]}. Leave the mask out, or use sr_ratio=1 and sr_pool=0"
            )
        kept = None if mask is None else mask[:, None, :, None].to(v.dtype)  # (B, 1, N, 1)
        out = self.kernel(q, k, v, grid, kept)
        if self.conv is None:
            return out
        return out + self.convolved(v if kept is None else v * kept, grid)

    def convolved(self, v: Tensor, grid: Grid) -> Tensor:
        """The convolution of the values along the sequence of tokens, (B, h, N, d) -> (B, h, N, d)."""
        return convolve_sequence(cast("nn.Conv2d", self.conv), v)

    @recomputed
    @full_precision
    def kernel(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, kept: Tensor | None = None) -> Tensor:
        """The attention through landmarks."""
        parts = self._kernels(q, k, grid, kept)
        if len(parts) == 1:
            return parts[0] @ v
        left, middle, right = parts
        return left @ (self._pinv(middle) @ (right @ v))

    def _kernels(self, q: Tensor, k: Tensor, grid: Grid, kept: Tensor | None = None) -> tuple[Tensor, ...]:
        """Row-wise softmax of `q kt^T`, `qt kt^T` and `qt k^T`, or of `q k^T` alone where all tokens are landmarks."""
        q, k = q * self.key_dim**-0.25, k * self.key_dim**-0.25
        hidden: Tensor | None = None
        if kept is not None:
            kept = kept.to(q.dtype)
            q, k = q * kept, k * kept
            hidden = -1e9 * (1 - kept.mT)  # (B, 1, 1, M)

        def over_keys(logits: Tensor) -> Tensor:
            return (logits if hidden is None else logits + hidden).softmax(-1)

        count = self.landmarks.count(grid)
        if count == min(grid.num_queries, grid.num_keys):
            return (over_keys(q @ k.mT),)
        qt = self.landmarks.means(q, count, grid.size, grid.num_prefix)
        kt = self.landmarks.means(k, count, grid.keys_size, grid.num_prefix)
        return (q @ kt.mT).softmax(-1), (qt @ kt.mT).softmax(-1), over_keys(qt @ k.mT)

    def _pinv(self, kernel: Tensor) -> Tensor:
        """Iterative pseudo-inverse of (B, h, m, m), by an iteration of third order."""
        column_sums = kernel.sum(-2, keepdim=True)  # (B, h, 1, m)
        largest = column_sums.amax(-1, keepdim=True) if self.init == "exact" else column_sums.amax()
        inverse, matrices = (kernel.mT / largest).flatten(0, 1), kernel.flatten(0, 1)  # (B h, m, m)
        for _ in range(self.pinv_iters):  # Y (13 - x (15 - x (7 - x))) / 4 for x = K Y
            x = matrices @ inverse
            polynomial = torch.baddbmm(x, x, x, beta=7, alpha=-1)
            polynomial = torch.baddbmm(x, x, polynomial, beta=15, alpha=-1)
            inverse = torch.baddbmm(inverse, inverse, polynomial, beta=13 / 4, alpha=-1 / 4)
        return inverse.view_as(kernel)

    def kernel_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """`softmax(q kt^T) pinv(...)` and `softmax(qt k^T)^T`; None where m is all tokens."""
        parts = self._kernels(q, k, grid)
        if len(parts) == 1:
            return None
        left, middle, right = parts
        return left @ self._pinv(middle), right.mT

    def kernel_rank(self, grid: Grid) -> int:
        """The number of landmarks."""
        return self.landmarks.count(grid)
