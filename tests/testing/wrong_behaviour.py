"""Mechanisms that exit, remember, refuse or couple: each changes one thing in the sound one."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import Grid, UserError
from tests.testing.wrong import PerChannel, Sound

LARGE = 1000  # tokens


class ExitsAtConstruction(Sound):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        sys.exit(0)


class ExitsInForward(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        sys.exit("no licence")


class ExitsAtPrefix(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        if grid.num_prefix:
            sys.exit()
        return super().forward(q, k, v, grid)


class CountsItsTraining(Sound):
    """What training collects is used in evaluation, and is in no state dict."""

    steps = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        if self.training:
            self.steps += 1
        return super().forward(q, k, v, grid) / (1 + self.steps)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> None:
        return None


class CentresTheBatch(PerChannel):
    """Linear in the values, but in those of the whole batch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return Sound.forward(self, q, k, v - v.mean(0), grid)


class DropsInEvaluation(PerChannel):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return F.dropout(Sound.forward(self, q, k, v, grid), 0.1)


class DropsInTraining(Sound):
    """As it should be."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return F.dropout(super().forward(q, k, v, grid), 0.1, self.training)


class DropsAndCouplesInTraining(DropsInTraining):
    def features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return super().features(q, k / k.abs().amax() if self.training else k)


class RefusesThin(Sound):
    """The forward pass refuses a single row or column of patches."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        if min(grid.size) == 1:
            raise UserError(f"a grid has at least two rows and columns; got {grid.size[0]}x{grid.size[1]}")
        return super().forward(q, k, v, grid)


class RefusesLargeCalls(Sound):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        if grid.num_queries > LARGE:
            raise UserError(f"at most {LARGE} tokens; got {grid.num_queries}")
        return super().forward(q, k, v, grid)


class RefusesToBeLarge(Sound):
    def __init__(self, dim: int, num_heads: int, grid: Grid, *, key_dim: int | None = None) -> None:
        super().__init__(dim, num_heads, grid, key_dim=key_dim)
        if grid.num_queries > LARGE:
            raise UserError(f"at most {LARGE} tokens; got {grid.num_queries}")


class RefusesLargeAndIsCoarse(RefusesLargeCalls):
    """Refusing one size excuses no fault at the others."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        out = super().forward(q, k, v, grid)
        return (out * 8).round() / 8 if v.dtype == torch.bfloat16 else out
