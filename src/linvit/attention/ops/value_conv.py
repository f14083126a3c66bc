"""Depthwise convolutions of the values, and mechanisms that add one to a kernel of q and k.

They lift the rank of a linear attention from its number of features to N.
With one kernel per channel, `o_c += w_c * v_c + b_c`, several papers call it LePE (locally enhanced position encoding,
Dong et al. 2022, "CSWin Transformer"), Agent Attention DWC. With one per head, which its channels share (the code of
Lu et al. 2021, "SOFT"), it leaves one matrix per head.
Cost: k^2 P C MACs for kernels of side k at P patches.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.base import Attention, Grid
from linvit.attention.ops.functional import is_exporting, join_heads, split_heads
from linvit.attention.packed import Packed
from linvit.errors import check_number, check_odd


def check_side(option: str, side: int, examples: str) -> None:
    """Raises a `UserError` unless `side` is that of a kernel with a centre, or 0 for no convolution."""
    check_number(option, side, at_least=0, whole=True, note=" (0: no convolution)")
    if side:
        check_odd(option, side, f"{examples}, or 0 for no convolution")


def head_conv(num_heads: int, size: int) -> nn.Conv2d | None:
    """Returns the convolution over an image whose channels are the heads; None for size 0."""
    check_side("conv_size", size, "3, 5 or 9")
    if size == 0:
        return None
    return nn.Conv2d(num_heads, num_heads, size, padding=size // 2, groups=num_heads, bias=False)


def convolve_heads(conv: nn.Conv2d, v: Tensor, grid: Grid) -> Tensor:
    """Returns convolved patch values, (B, h, M, d) -> (B, h, N, d); 0 for prefix tokens.

    Values on another grid than the queries' (spatial reduction) are brought to it first, bilinearly.
    """
    kernels, reach = _per_channel(conv, v), int(conv.padding[0])  # (h*d, 1, s, s)
    convolve = partial(F.conv2d, weight=kernels, padding=reach, groups=len(kernels))
    if isinstance(grid, Packed):
        return split_heads(grid.convolve(convolve, join_heads(v), reach), v.shape[1])
    patches = v[:, :, grid.num_prefix :].transpose(1, 2).flatten(2)  # (B, patches, h*d)
    plane = patches.mT.unflatten(2, grid.keys_size)  # (B, h*d, H, W), channels last in memory
    if grid.keys_size != grid.size:
        plane = F.interpolate(plane, size=grid.size, mode="bilinear", align_corners=False)
    local = convolve(plane).flatten(2).mT.unflatten(2, (v.shape[1], v.shape[3])).transpose(1, 2)  # (B, h, H*W, d)
    return F.pad(local, (0, 0, grid.num_prefix, 0)) if grid.num_prefix else local


def convolve_sequence(conv: nn.Conv2d, v: Tensor, grid: Grid | Packed | None = None) -> Tensor:
    """Returns values (B, h, N, d) convolved along the sequence of all tokens by kernels (h, 1, r, 1), (B, h, N, d)."""
    if isinstance(grid, Packed):
        return grid.convolve_sequence(lambda row: convolve_sequence(conv, row), v, int(conv.padding[0]))
    kernels = _per_channel(conv, v).squeeze(3)  # (h*d, 1, r)
    tokens = v.mT.flatten(1, 2)  # (B, h*d, N)
    along = F.conv1d(tokens, kernels, padding=conv.padding[0], groups=len(kernels))
    return along.unflatten(1, v.shape[1::2]).mT  # type: ignore[no-any-return]


def _per_channel(conv: nn.Conv2d, v: Tensor) -> Tensor:
    """Repeats each head's kernel per channel, (h*d, 1, ...): depthwise, many times faster than h groups."""
    return conv.weight.to(v.dtype).repeat_interleave(v.shape[3], 0)


def value_conv(option: str, dim: int, side: int) -> nn.Conv2d | None:
    """Builds a convolution of C = `dim` channels with bias; None for side 0. `option` sets the side, for messages."""
    check_side(option, side, "3 or 5")
    return depthwise_conv(dim, side) if side else None


def depthwise_conv(dim: int, side: int) -> nn.Conv2d:
    """Returns a convolution with one kernel of odd sides per channel that keeps the size of the map."""
    return nn.Conv2d(dim, dim, side, padding=side // 2, groups=dim)


def convolve_as_given(conv: nn.Conv2d, plane: Tensor) -> Tensor:
    """Returns a depthwise convolution with a bias in the precision of the plane, whatever that of its parameters."""
    weight, bias = (parameter.to(plane.dtype) for parameter in conv.parameters())
    return F.conv2d(plane, weight, bias, padding=cast("tuple[int, int]", conv.padding), groups=len(weight))


def convolve_values(conv: Callable[[Tensor], Tensor], v: Tensor, grid: Grid) -> Tensor:
    """Returns convolved patch values with the bias, (B, h, M, d) -> (B, h, N, d); 0 for prefix tokens.

    Values on another grid than the queries' (spatial reduction) are brought to it first, bilinearly.
    """
    if isinstance(grid, Packed):
        return split_heads(grid.convolve(conv, join_heads(v), cast("Any", conv).padding[0]), v.shape[1]).to(v.dtype)
    rows = join_heads(v)[:, grid.num_prefix :]  # (B, patches, C)
    plane = rows.mT.unflatten(2, grid.keys_size)  # (B, C, H, W), channels last in memory
    if grid.keys_size != grid.size:
        plane = F.interpolate(plane, size=grid.size, mode="bilinear", align_corners=False)
    local = conv(plane).flatten(2).mT  # (B, H*W, C)
    if grid.num_prefix:
        local = F.pad(local, (0, 0, grid.num_prefix, 0))
    return split_heads(local, v.shape[1]).to(v.dtype)


def convolve_each(plane: Tensor, kernels: Tensor) -> Tensor:
    """Returns every channel of every image (B, C, H, W) convolved by its own kernel, of (B, C, k, k)."""
    if is_exporting() or not len(plane):  # `groups` would fix the number of images, and must not be 0
        parts = zip(shifts(plane, kernels.shape[-1]), kernels.flatten(2).unbind(-1), strict=True)
        return torch.stack([shifted * entry[..., None, None] for shifted, entry in parts]).sum(0)
    alone, kernels = plane.flatten(0, 1)[None], kernels.flatten(0, 1)[:, None]  # (1, B C, H, W), (B C, 1, k, k)
    return F.conv2d(alone, kernels, padding=kernels.shape[-1] // 2, groups=len(kernels)).view_as(plane)


def convolve_images(kernels: Tensor, v: Tensor, grid: Grid | Packed) -> Tensor:
    """`convolve_values` by kernels of each image and channel, (B, C, k, k), in a pack in the order of the row."""
    if isinstance(grid, Packed):
        of_sizes = iter(kernels.split([n for _, n in grid.groups]))
        return grid.map_images(lambda own, one: convolve_images(next(of_sizes), own, one), v)
    return convolve_values(lambda plane: convolve_each(plane, kernels.to(plane.dtype)), v, grid)


def shifts(plane: Tensor, side: int) -> list[Tensor]:
    """Returns for each entry of a kernel of this side the shifted plane (..., H, W), zero-padded, row by row."""
    (height, width), around = plane.shape[-2:], F.pad(plane, (side // 2,) * 4)
    return [around[..., i : i + height, j : j + width] for i in range(side) for j in range(side)]


class ConvolvedAttention(Attention):
    """A mechanism that adds a convolution of the values to its `core`.

    A subclass has the convolution under the name `convolution`, where None leaves it out.

    Attributes:
        convolution: Name of the attribute.
        depthwise: True if it is a convolution whose matrix `ConvolvedValues` writes without probing.
        core_channelwise: True if the core's matrix differs from channel to channel.
    """

    convolution: ClassVar[str]
    depthwise: ClassVar[bool] = True
    core_channelwise: ClassVar[bool] = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, *more: Any, **extra: Any) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        if getattr(self, self.convolution) is None:
            return self.core(q, k, v, grid, *more, **extra)
        # The convolution comes first, since torch.compile lays out what precedes one as the channels of an image.
        return self.convolved(v, grid) + self.core(q, k, v, grid, *more, **extra)  # token by token, like the first

    def convolved(self, v: Tensor, grid: Grid) -> Tensor:
        """Returns the convolution of the values, (B, h, M, d) -> (B, h, N, d); 0 for prefix tokens."""
        return convolve_values(getattr(self, self.convolution), v, grid)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """Those of the core; None with the convolution, whose matrix has no thin factors."""
        return self.core_factors(q, k, grid) if getattr(self, self.convolution) is None else None

    def core_factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        """Factors of the core's matrix; see `Attention.factors`."""
        return None

    def rank_bound(self, grid: Grid) -> int:
        """Returns the number of tokens; without the convolution the rank of the core, if that is smaller."""
        tokens = min(grid.num_queries, grid.num_keys)
        return tokens if getattr(self, self.convolution) is not None else min(tokens, self.core_rank(grid))

    def core_rank(self, grid: Grid) -> int:
        """Returns an upper bound of the rank of the core's matrix: `max_rank`, unless it depends on the grid."""
        return super().rank_bound(grid)

    def matrix_parts(self) -> dict[str, Attention]:
        """Returns the core and the convolution, if there is one."""
        conv = getattr(self, self.convolution)
        if conv is None:
            return {}
        core = copy.deepcopy(self)
        core.register_module(self.convolution, None)
        core.declare(channelwise=self.core_channelwise, input=False)
        return {"kernel": core, "convolution": ConvolvedValues(self, conv if self.depthwise else None)}


class ConvolvedValues(Attention):
    """The convolution of a mechanism alone, `o = conv(v)`.

    Args:
        depthwise: The convolution itself, where it is one over the grid of the patches, padded with zeros, with a
            kernel per channel, or per channel of a head, which all heads share: then its matrix need not be probed.
    """

    def __init__(self, whole: Attention, depthwise: nn.Conv2d | None = None) -> None:
        super().__init__(whole.dim, whole.num_heads, whole.grid, key_dim=whole.key_dim)
        self.whole = whole
        self.depthwise = depthwise
        self.declare(channelwise=whole.facts.channelwise, input=whole.host.input)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, **extra: Tensor) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        return self.whole.convolved(v, grid, **extra)  # type: ignore[no-any-return, operator]


def depthwise_matrix(kernels: Tensor, grid: Grid) -> Tensor:
    """Returns banded matrices (..., N, N) of zero-padded convolutions of patches with odd kernels (..., s, t)."""
    (rows, columns), (s, t) = grid.size, kernels.shape[-2:]
    down, right = (  # (H, H) and (W, W): which row and column of a kernel is between a query and a key
        torch.arange(side, device=kernels.device) - torch.arange(side, device=kernels.device)[:, None] + width // 2
        for side, width in ((rows, s), (columns, t))
    )
    inside = ((down >= 0) & (down < s))[:, None, :, None] & ((right >= 0) & (right < t))[:, None]  # (H, W, H, W)
    entry = down.clamp(0, s - 1)[:, None, :, None] * t + right.clamp(0, t - 1)[:, None]
    matrix = torch.where(inside, kernels.flatten(-2)[..., entry], 0).flatten(-4, -3).flatten(-2)  # (..., H*W, H*W)
    return F.pad(matrix, (grid.num_prefix, 0, grid.num_prefix, 0))
