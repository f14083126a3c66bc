"""Attention of Twins in windows that it cuts itself; its other half is PVT's."""

from typing import Any

from timm.models import twins
from torch import Tensor

from linvit.attention.base import Grid
from linvit.backbones.timm.hosts import Model, ReplacedAttention
from linvit.layers.hosting import queries_keys_values
from linvit.layers.windows import Windows
from linvit.registry import Spec


class ReplacedTwinsAttention(ReplacedAttention):
    """Replaces Twins' attention within groups of neighbours, padded by zeros as there."""

    sources = (twins.LocallyGroupedAttn,)

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        super().__init__(source, spec, Grid((source.ws, source.ws)))

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, N, C) -> (B, N, C) for the plane (H, W)."""
        windows = Windows((size[0], size[1]), self.mechanism.grid.size)
        t = self.stemmed(x, Grid(windows.size))
        parts = windows.partition(t)
        q, k, v = queries_keys_values(self.mechanism, self.projected(parts), parts)
        out = windows.reverse(self.attended(parts, q, k, v, self.mechanism.grid))
        return self.project(out, x)
