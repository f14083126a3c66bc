"""Enhanced linear attention (EfficientViT): `o_s = phi(q_s) (phi(k_s)^T v_s) / (phi(q_s) sum_n phi(k_s,n) + eps)`.

`phi` is relu, and the outputs of several scales are concatenated. The first takes q, k and v as they are; for each of
the others they are aggregated with their neighbours by a depthwise s x s convolution and a 1x1 convolution per head.

Paper: Cai et al. 2022, "EfficientViT: Enhanced Linear Attention for High-Resolution Low-Computation Visual
Recognition"; the scales came with its later versions ("EfficientViT: Multi-Scale Linear Attention", 2023).
Their block is `{head_dim: 16, proj_norm: bn2d}` (32 in the larger models) in a backbone with `ffn: mbconv`, without the
LayerNorms of ours; the first version has `scales: []` (so we read it: the published code is of the later ones).
Cost: `(1 + S) ((N + M) C dk + N h dk) + S h ((P + Q) dk (s^2 + dk) + Q d (s^2 + d))` MACs for S aggregations of side s
and C = h d. Rank: at most d per scale.

For fewer tokens than channels per head the reference multiplies `q k^T` first. It is the same function, and here the
order is always the one above.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid, Packed
from linvit.attention.declarations import Facts
from linvit.attention.ops.decorators import full_precision
from linvit.attention.ops.functional import join_heads, split_heads
from linvit.attention.ops.linear import linear_attention, linear_factors
from linvit.errors import UserError, check_choice, check_number, check_odd


class EnhancedLinearAttention(Attention):
    """Multi-scale ReLU linear attention, O(N d^2), with `out_dim = (1 + len(scales)) * h * d`.

    The reference aggregates q, k and v in one convolution with channels laid out as [q | k | v] per head. No group of
    it mixes the three, so each has its own part of the weights here, and keys may be narrower or fewer than queries.

    Prefix tokens bypass the aggregation: at the further scales their queries stay, their keys and values are 0.

    With scales the output is not one matrix times v: `attention_matrix` gives one per head and scale, which acts on the
    aggregated values v_s.

    Args:
        dim: Channels C. (The reference's `dim` is `head_dim` here.)
        num_heads: The host's heads.
        grid: Nominal grid (unused: nothing here has a fixed length).
        key_dim: Channels of q and k per head; None means d.
        head_dim: Width d of a head: 16 or 32 in the published models. There are h = int(C // d * heads_ratio) of them,
            so that the values have h d channels for any C. None leaves the host's heads.
        heads_ratio: Heads over those that C has room for; without `head_dim`, over the host's (rounded down).
        scales: Sides of the aggregation's depthwise kernels, odd; () leaves plain ReLU linear attention.
        agg_bias: Biases in the aggregation's convolutions.
        eps: Added to the denominator, positive: 1e-15 in the reference, 1e-5 in timm. A query without a positive entry
            gives 0 with either. The sums run in at least float32, which 1e-15 fits (float16 would make it 0).
        proj_norm: Norm behind the host's output projection: "none", or "bn2d", the reference's BatchNorm. It takes the
            place of the projection's bias and, in training, lets the samples of a batch depend on each other.
    """

    facts = Facts(complexity="O(N)", packs=True)
    precision = "inherit"  # each scale runs in float32, its convolutions as all others

    def __init__(
        self,
        dim: int,
        num_heads: int,
        grid: Grid,
        *,
        key_dim: int | None = None,
        head_dim: int | None = None,
        heads_ratio: float = 1.0,
        scales: Sequence[int] = (5,),
        agg_bias: bool = False,
        eps: float = 1e-15,
        proj_norm: Literal["none", "bn2d"] = "none",
    ) -> None:
        # Heads with their own width need not divide C.
        super().__init__(dim, num_heads if head_dim is None else 1, grid, key_dim=key_dim)
        if not isinstance(scales, list | tuple):
            raise UserError(f"scales must be a list such as [5] or [3, 5], or [] for none; got {scales!r}")
        for scale in scales:
            check_odd("scales", scale, "[5] or [3, 5], or [] for none")
        check_choice("proj_norm", proj_norm, ["none", "bn2d"])
        check_number("eps", eps, at_least=torch.finfo(torch.float32).tiny, note=", such as 1e-15 or 1e-5")
        self.scales = tuple(scales)
        self.eps = eps
        self._choose_heads(dim, head_dim, heads_ratio, key_dim)
        self.out_dim = self.dim * (1 + len(self.scales))
        self.declare(norm=proj_norm, linear_in_values=not self.scales, max_rank=self.key_dim)

        def aggregations(width: int) -> nn.ModuleList:
            return nn.ModuleList(_aggregation(self.num_heads, width, scale, agg_bias) for scale in self.scales)

        self.q_aggregations = aggregations(self.key_dim)
        self.k_aggregations = aggregations(self.key_dim)
        self.v_aggregations = aggregations(self.head_dim)

    def _choose_heads(self, dim: int, head_dim: int | None, heads_ratio: float, key_dim: int | None) -> None:
        """Sets the heads and the values that depend on them."""
        check_number("heads_ratio", heads_ratio, above=0)
        if head_dim is not None:
            check_number("head_dim", head_dim, at_least=1, whole=True)
            self.num_heads, self.head_dim = dim // head_dim, head_dim
            self.key_dim = head_dim if key_dim is None else key_dim
        room, self.num_heads = self.num_heads, int(self.num_heads * heads_ratio)
        if not self.num_heads:
            raise UserError(
                f"dim {dim} has room for {room} heads of {self.head_dim} channels, and heads_ratio "
                f"{heads_ratio:g} leaves none; set a smaller head_dim or a larger heads_ratio"
            )
        self.key_heads = self.out_heads = self.num_heads
        self.dim = self.num_heads * self.head_dim

    def core(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, (1 + S) d), the unaggregated scale first."""
        scales = zip(self.queries(q, grid), self.keys(k, grid), self.values(v, grid), strict=True)
        return torch.cat([self._attend(*scale, grid) for scale in scales], dim=-1).to(v.dtype)

    @full_precision
    def _attend(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid | Packed) -> Tensor:
        """Returns the linear attention of one scale."""
        return linear_attention(F.relu(q), F.relu(k), v, self.eps, grid=grid)

    def queries(self, q: Tensor, grid: Grid) -> list[Tensor]:
        """Returns the queries at every scale, (B, h, N, dk) each."""
        return self._at_scales(q, self.q_aggregations, grid, keys=False)

    def keys(self, k: Tensor, grid: Grid) -> list[Tensor]:
        """Returns the keys at every scale, (B, h, M, dk) each."""
        return self._at_scales(k, self.k_aggregations, grid, keys=True)

    def values(self, v: Tensor, grid: Grid) -> list[Tensor]:
        """Returns the values v_s at every scale, (B, h, M, d) each."""
        return self._at_scales(v, self.v_aggregations, grid, keys=True)

    def _at_scales(self, x: Tensor, aggregations: nn.ModuleList, grid: Any, *, keys: bool) -> list[Tensor]:
        """Returns tokens (B, h, N, d) unchanged and aggregated; there prefix queries stay, and prefix keys are 0."""
        rows, heads = join_heads(x), x.shape[1]
        if isinstance(grid, Packed):
            places = grid.prefix(x.device)
            prefix = x.index_select(2, places)
            local = [
                _aggregated(lambda conv: grid.convolve(conv, rows, conv.padding[0]), one, heads) for one in aggregations
            ]
            return [x, *(one.index_copy(2, places, torch.zeros_like(prefix) if keys else prefix) for one in local)]
        plane = rows[:, grid.num_prefix :].mT.unflatten(2, grid.keys_size if keys else grid.size)  # (B, h*d, H, W)
        patches = [_aggregated(lambda conv: conv(plane).flatten(2).mT, one, heads) for one in aggregations]
        if grid.num_prefix:
            prefix = x[:, :, : grid.num_prefix]
            patches = [torch.cat([torch.zeros_like(prefix) if keys else prefix, one], dim=2) for one in patches]
        return [x, *patches]  # (B, h, N, d) each

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        """`diag(1 / (Q K^T 1 + eps)) Q` and `K` per head and scale: (B, h*(1+S), N, dk), (B, h*(1+S), M, dk)."""
        q, k = (torch.stack(scales, dim=2).flatten(1, 2) for scales in (self.queries(q, grid), self.keys(k, grid)))
        return linear_factors(F.relu(q), F.relu(k), self.eps)

    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor | None, grid: Grid) -> Tensor:
        """Returns matrices (B, h*(1+S), N, M) that act on the values v_s: head 0 at every scale, then head 1, ..."""
        left, right = self.factors(q, k, grid)
        return left @ right.mT


def _aggregation(num_heads: int, head_dim: int, scale: int, bias: bool) -> nn.Sequential:
    """Returns a depthwise convolution of each channel, then a 1x1 convolution of each head's channels."""
    width = num_heads * head_dim
    return nn.Sequential(
        nn.Conv2d(width, width, scale, padding=scale // 2, groups=width, bias=bias),
        nn.Conv2d(width, width, 1, groups=num_heads, bias=bias),
    )


def _aggregated(convolved: Callable[[Any], Tensor], aggregation: nn.Module, heads: int) -> Tensor:
    """Returns what a convolution makes of tokens, (B, N, h*d), aggregated further, (B, h, N, d)."""
    depthwise, pointwise = cast("Iterable[nn.Conv2d]", aggregation)
    local = split_heads(convolved(depthwise), heads)
    # The 1x1 convolution as a product per head: torch convolves image by image and head by head, with copies.
    weight = pointwise.weight.flatten(1).unflatten(0, (heads, -1)).mT  # (h, d, d)
    out: Tensor = local @ weight
    return out if pointwise.bias is None else out + pointwise.bias.view(heads, 1, -1)
