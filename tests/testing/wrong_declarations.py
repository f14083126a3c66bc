"""Mechanisms that declare what is not so, or in words that nobody reads: each changes one thing in the sound one."""

from typing import Any

import torch
from torch import Tensor

from linvit import Attention, Grid
from tests.testing.wrong import NonLinearInValues, PerChannel, Sound


class NeedsAllKeys(Sound):
    """Adds each token's own value, undeclared."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return super().forward(q, k, v, grid) + v

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> None:
        return None

    rank_bound = Attention.rank_bound


class DeclaresAllKeys(NeedsAllKeys):
    fewer_keys = False


class NeedsWideKeys(Sound):
    """Keys and values meet entry by entry, undeclared."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return super().forward(q, k + 0 * v, v, grid)


class DeclaresWideKeys(NeedsWideKeys):
    narrow_keys = False


class IgnoresKeyDim(Sound):
    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid)


class TwiceAsWide(PerChannel):
    """Linear in the values, and of twice as many channels."""

    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.out_dim = 2 * dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        out = Sound.forward(self, q, k, v, grid)
        return torch.cat([out, 2 * out], dim=-1)

    rank_bound = Attention.rank_bound


class HasNoMatrix(NonLinearInValues):
    linear_in_values = False


class TakesOnlyDim(Attention):
    def __init__(self, dim: int) -> None:
        super().__init__(dim, 1, Grid((14, 14)))


class NeedsAnOption(Sound):
    def __init__(self, dim: int, num_heads: int, grid: Grid, *, width: int) -> None:
        super().__init__(dim, num_heads, grid)
        self.width = width


class NarrowByDefault(Sound):
    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int = 8) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)


class ComplexityInWords(Sound):
    complexity = "linear"


class OtherProjections(Sound):
    projections = "qq"


class OtherNorm(Sound):
    proj_norm = "ln"


class GateInOtherWords(Sound):
    gate = "tanh"


class WrongChannels(Sound):
    """The channels' matrix of another mechanism, beside a matrix over tokens."""

    def channel_matrix(self, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
        return q.mT @ k


class FlagInWords(Sound):
    takes_bias = "no"


class FractionalWidth(Sound):
    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.out_dim = 1.5 * dim


class UnevenWidth(FractionalWidth):
    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        self.out_dim = dim + 1


class StateInBytes(Sound):
    state_size = 1.5  # type: ignore[assignment]


class LinearWithoutMatrix(Sound):
    no_matrix = "its weights depend on the values"


class BoundInWords(Sound):
    def rank_bound(self, grid: Grid) -> Any:
        return "the width of the keys"


class OneFactor(Sound):
    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> Any:
        return q


class ReturnsItsState(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Any:
        return super().forward(q, k, v, grid), k


class ReturnsNothing(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Any:
        super().forward(q, k, v, grid)


class CrashesInForward(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        raise RuntimeError("out of luck")
