"""Token-level multi-head linear attention (MHLA): `o_i = Q_i (sum_j W_ij S_j) / (Q_i sum_j W_ij t_j) + lepe(v)`.

The grid is cut into blocks. `S_j = K_j^T v_j` and `t_j = sum K_j` are the sums of linear attention over the keys of
block j, and the learnt W says how much the queries of block i take of each. So the parts of an image mix different
keys, and the rank grows with the blocks. Q and K are `relu + 1e-6` of q and k after an RMSNorm over all channels.

Paper: Zhang et al. 2026, "MHLA: Restoring Expressivity of Linear Attention via Token-Level Multi-Head" (ICLR).
Cost: `N C dk + (N + T^2) (C + h) dk + s^2 P C` MACs for T blocks of equal size and a convolution of side s. Rank: N
per channel (T dk without the convolution).

Here the number of blocks is fixed, 4 x 4, where the authors' code fixes their side, 4 tokens. At its 16 x 16 tokens
that is the same; elsewhere the cost stays linear and W of one size. Where a side of the grid does not divide, the last
blocks are smaller. Prefix tokens, which the authors do not have, form a separate block; it gives to each of the n
others, and takes from it, with weight 1 / n, the mean of W at first.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Grid
from linvit.attention.declarations import Facts
from linvit.attention.ops.functional import SizeOf, join_heads, same_size, split_heads, upcast, wide
from linvit.attention.ops.linear import wide_product
from linvit.attention.ops.value_conv import ConvolvedAttention, value_conv
from linvit.errors import check_number

RELU_EPS = 1e-6  # added to the features
NORM_EPS = torch.finfo(torch.float32).eps


INITIAL = {
    "linear": lambda distance, largest: 1 - distance / largest,
    "cos": lambda distance, largest: (math.pi / 4 * distance / largest).cos(),
    "exp": lambda distance, largest: (-distance).exp(),
    "local": lambda distance, largest: (distance <= 1.5).to(distance),
    "gaussian": lambda distance, largest: (-((3 * distance / largest) ** 2) / 2).exp(),
}
"""Initial W from the distances of blocks, in blocks, and the largest of them."""


class Blocks(NamedTuple):
    """Division of a grid. If a side is not divisible, the last blocks are smaller and are filled with zeros."""

    size: tuple[int, int]
    sides: tuple[int, int]

    @property
    def counts(self) -> tuple[int, int]:
        """Blocks per column and per row of the grid."""
        return -(-self.size[0] // self.sides[0]), -(-self.size[1] // self.sides[1])

    def cut(self, x: Tensor) -> Tensor:
        """Returns patches (B, h, H W, d) as blocks (B, h, G, w, d) of w patches each, both row by row."""
        plane: Tensor = x.unflatten(2, self.size)
        missing = [n * side - whole for n, side, whole in zip(self.counts, self.sides, self.size, strict=True)]
        if any(missing):
            plane = F.pad(plane, (0, 0, 0, missing[1], 0, missing[0]))
        parts: Tensor = plane.unflatten(3, (-1, self.sides[1])).unflatten(2, (-1, self.sides[0])).transpose(3, 4)
        return parts.flatten(4, 5).flatten(2, 3)

    def join(self, blocks: Tensor) -> Tensor:
        """Returns the blocks of `cut` as patches (B, h, H W, d)."""
        parts: Tensor = blocks.unflatten(3, self.sides).unflatten(2, self.counts).transpose(3, 4)
        plane = parts.flatten(4, 5).flatten(2, 3)
        patches: Tensor = plane[:, :, : self.size[0], : self.size[1]].flatten(2, 3)
        return patches

    def numbers(self, device: torch.device) -> Tensor:
        """Returns the block of each patch, (H W,)."""
        rows, columns = (
            torch.arange(whole, device=device) // side for whole, side in zip(self.size, self.sides, strict=True)
        )
        return (rows[:, None] * self.counts[1] + columns).flatten()


def even_blocks(size: tuple[int, int], most: int) -> Blocks:
    """Returns at most `most` blocks per column and per row of a grid."""
    return Blocks(size, (-(-size[0] // most), -(-size[1] // most)))


def initial_weights(counts: tuple[int, int], init: str) -> Tensor:
    """Returns W (G, H, G, H) of blocks in G rows and H columns; see `linvit.attention.mhla`."""
    places = torch.cartesian_prod(*(torch.arange(count, dtype=torch.get_default_dtype()) for count in counts))
    distance = torch.cdist(places, places)
    weights = INITIAL[init](distance, distance.max().clamp_min(1))
    if init != "gaussian":
        weights = weights / weights.sum(0)
    table: Tensor = weights.unflatten(1, counts).unflatten(0, counts)
    return table


def resize_weights(weights: Tensor, counts: tuple[int, int]) -> Tensor:
    """Returns weights (G, H, G, H) of blocks to blocks for other numbers of blocks, bilinear in both places.

    The sum over all blocks keeps its size: of more blocks each weighs less.
    """
    old = (weights.shape[0], weights.shape[1])
    if same_size(old, counts):
        return weights

    def resized(x: Tensor) -> Tensor:
        """Interpolates the last two dimensions, (n, G, H) -> (n, G', H')."""
        return F.interpolate(x[None], size=counts, mode="bilinear", align_corners=False)[0]

    table = resized(weights.flatten(0, 1)).flatten(1).T  # keys (G' H') by queries (G H)
    table = resized(table.unflatten(1, old)).flatten(1).T  # queries (G' H') by keys (G' H')
    share = (old[0] * old[1]) / (counts[0] * counts[1])
    found: Tensor = (table * share).unflatten(1, counts).unflatten(0, counts)
    return found


class MHLAttention(ConvolvedAttention):
    """Linear attention with learnt weights between blocks of the grid, O(N d^2).

    Args:
        grid: Nominal grid; fixes the shape of W, which is resized (bilinear) for other numbers of blocks.
        blocks: Blocks per column and per row of the grid, at most; fewer where it has not as many patches.
        init: Initial W, by the distance D of blocks, whose largest is L: "linear" `1 - D / L`, "cos" `cos(pi D / 4 L)`,
            "exp" `exp(-D)`, "local" 1 up to D = 1.5, all divided by the sums of their columns; "gaussian"
            `exp(-(3 D / L)^2 / 2)`, not divided.
        qk_norm: RMSNorm of q and of k over all channels.
        lepe_kernel: Side of the depthwise convolution of the values; 0 leaves it out.
        denominator: "own": each query by the sums that its block takes, so that rows sum to 1 (as we read the paper).
            "reference": as the authors' code, `sum_j W_ij (q_jw . t_j)` with the queries at the same place w of all
            blocks that have this place, and own ones for the prefix.
        eps: Added to the denominator.
    """

    facts = Facts(complexity="O(N)", same_grid=True)
    precision = "mixed"
    convolution = "lepe"
    exports_any_size = False  # the grid decides how many blocks there are, and whether they are padded

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        blocks: int = 4,
        init: Literal["linear", "cos", "exp", "local", "gaussian"] = "linear",
        qk_norm: bool = True,
        lepe_kernel: int = 5,
        denominator: Literal["own", "reference"] = "own",
        eps: float = 1e-6,
    ) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        check_number("blocks", blocks, at_least=1, whole=True)
        check_number("eps", eps, at_least=0)
        self.blocks = blocks
        self.own_queries = denominator == "own"
        self.eps = eps
        self.weights = nn.Parameter(initial_weights(even_blocks(grid.size, blocks).counts, init))  # W (G, H, G, H)
        width = self.key_dim * num_heads
        self.q_norm, self.k_norm = (nn.RMSNorm(width, eps=NORM_EPS) if qk_norm else None for _ in "qk")
        self.lepe = value_conv("lepe_kernel", dim, lepe_kernel)
        self.declare(channelwise=self.lepe is not None)

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """Returns the linear attention."""
        q, k = self._features(q, self.q_norm).to(v.dtype), self._features(k, self.k_norm).to(v.dtype)
        numerator, denominator = self._quotient(q, k, v, grid)
        return numerator * denominator.reciprocal()

    def _features(self, x: Tensor, norm: nn.RMSNorm | None) -> Tensor:
        """`relu + 1e-6` of normed q or k, (B, h, N, dk) -> (B, h, N, dk), in at least float32."""
        if norm is not None:
            rows = F.rms_norm(upcast(join_heads(x)), norm.normalized_shape, norm.weight.to(wide(x)), norm.eps)
            x = split_heads(rows, self.num_heads)
        return F.relu(x) + RELU_EPS

    def _quotient(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """Numerators (B, h, N, d) and denominators (B, h, N, 1) of features q and k and values v."""
        prefix, blocks = grid.num_prefix, even_blocks(grid.size, self.blocks)
        queries, keys, values = (blocks.cut(x[:, :, prefix:]) for x in (q, k, v))  # (B, h, G, w, ...)
        sums = keys.mT @ values  # S (B, h, G, dk, d)
        totals = keys.sum(-2, keepdim=True, dtype=wide(k)).mT  # t (B, h, G, dk, 1)
        start = int(prefix > 0)
        if start:
            first = k[:, :, :prefix].unsqueeze(2)  # (B, h, 1, p, dk)
            sums = torch.cat([first.mT @ v[:, :, :prefix].unsqueeze(2), sums], dim=2)  # (B, h, T, dk, d)
            totals = torch.cat([first.sum(-2, keepdim=True, dtype=wide(k)).mT, totals], dim=2)
        weights = self._all_weights(grid).to(wide(q))

        def taken(each: Tensor) -> Tensor:
            """Returns the mixture of sums (B, h, T, dk, n) for the queries of each token, (B, h, N, n)."""
            mixed = (weights @ upcast(each).flatten(3)).view_as(each).to(q.dtype)
            of_patches = blocks.join(wide_product(queries, mixed[:, :, start:]))
            return torch.cat([wide_product(q[:, :, :prefix], mixed[:, :, 0]), of_patches], 2) if start else of_patches

        if self.own_queries:
            out = taken(torch.cat([sums, totals], dim=-1))
            numerator, denominator = out.split([v.shape[-1], 1], dim=-1)
            return numerator, denominator + self.eps
        queries = upcast(queries)
        each = (queries @ totals[:, :, start:]).squeeze(-1)  # q_jw . t_j (B, h, G, w)
        shared = weights[start:, start:] @ each
        if start:
            shared = shared + weights[1:, :1] * (queries @ totals[:, :, :1]).squeeze(-1)
        denominator = blocks.join(shared.unsqueeze(-1))
        if start:
            denominator = torch.cat([taken(totals)[:, :, :prefix], denominator], dim=2)
        return taken(sums), denominator + self.eps

    def _all_weights(self, grid: Grid) -> Tensor:
        """Returns W (T, T) at a grid, with the row and column of the block of prefix tokens first."""
        weights = resize_weights(self.weights, even_blocks(grid.size, self.blocks).counts).flatten(2).flatten(0, 1)
        return F.pad(weights, (1, 0, 1, 0), value=1 / len(weights)) if grid.num_prefix else weights

    def resize_tables(self, state: dict[str, Tensor], size_of: SizeOf) -> dict[str, Tensor]:
        """Returns W of a checkpoint, for the blocks of the nominal grid."""
        if "weights" in state and state["weights"].ndim == 4:
            state["weights"] = resize_weights(state["weights"], (self.weights.shape[0], self.weights.shape[1]))
        return state

    def core_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """Returns each query weighted per block, and each key at its block; None if not thinner than the matrix."""
        if self.rank_bound(grid) == grid.num_queries:
            return None
        q, k = self._features(q, self.q_norm), self._features(k, self.k_norm)
        _, denominator = self._quotient(q, k, k[..., :0], grid)
        weights, numbers = self._all_weights(grid).to(q.dtype), even_blocks(grid.size, self.blocks).numbers(q.device)
        if grid.num_prefix:
            numbers = F.pad(numbers + 1, (grid.num_prefix, 0))
        places = torch.eye(len(weights), dtype=q.dtype, device=q.device)[numbers]  # (N, T)
        left = weights[numbers][..., None] * (q / denominator).unsqueeze(-2)  # (B, h, N, T, dk)
        right = places[..., None] * k.unsqueeze(-2)
        return left.flatten(3), right.flatten(3)  # (B, h, N, T dk)

    def core_rank(self, grid: Grid) -> int:
        """Returns the number of blocks times the width of a head's keys."""
        return (math.prod(even_blocks(grid.size, self.blocks).counts) + (grid.num_prefix > 0)) * self.key_dim
