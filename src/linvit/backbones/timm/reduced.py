"""Replaces attention with spatial reduction, in PVTv2 and Twins, and in Next-ViT, whose keys are averages."""

from collections.abc import Sequence
from typing import Any

from timm.models import nextvit, pvt_v2, twins
from torch import Tensor

from linvit.attention.base import Grid
from linvit.backbones.timm.hosts import Model, ReplacedAttention
from linvit.layers.spatial_reduction import PooledReduction, StridedReduction, reducible_spec
from linvit.registry import Spec


class ReplacedPVTv2Attention(ReplacedAttention):
    """Replaces the attention of PVTv2 and the global one of Twins.

    Its spatial reduction is kept unless the mechanism needs as many keys as queries.
    """

    sources = (pvt_v2.Attention, twins.GlobalSubSampleAttn)
    kept = ReplacedAttention.kept | {"q", "kv", "sr", "norm"}

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        size = model.level(name)
        sr = reduction(source) if reducible_spec(spec, source.proj.in_features, source.num_heads, Grid(size)) else None
        super().__init__(source, spec, Grid(size, kv_size=None if sr is None else sr.reduced(size)))
        self.sr = sr

    def forward(self, x: Tensor, feat_size: Sequence[int]) -> Tensor:
        """Maps (B, N, C) to (B, N, C) for the plane (H, W)."""
        grid = Grid((feat_size[0], feat_size[1]))
        if self.sr is None:
            return self.mix(x, grid)
        t = self.stemmed(x, grid)
        k, v = self.kv(self.sr(t, grid)).split(self.widths[1:], -1)
        return self.project(self.attended(t, self.q(t), k, v, Grid(grid.size, self.sr.reduced(grid.size))), x)


def reduction(source: Any) -> StridedReduction | PooledReduction | None:
    """Builds PVTv2's spatial reduction with timm's layers in it."""
    if source.sr is None:
        return None
    dim = source.sr.in_channels
    sr: StridedReduction | PooledReduction
    if getattr(source, "pool", None) is None:
        sr = StridedReduction(dim, source.sr.stride[0])
    else:
        sr = PooledReduction(dim, source.pool.output_size)
    sr.conv, sr.norm = source.sr, source.norm
    return sr


class ReplacedNextViTAttention(ReplacedAttention):
    """Replaces Next-ViT's attention, with its averages unless the mechanism needs as many keys as queries.

    For the mechanism the averages, which cross the ends of rows, are one row of keys.
    """

    sources = (nextvit.EfficientAttention,)
    kept = ReplacedAttention.kept | {"q", "k", "v", "norm"}

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        size = model.level(name)
        kept = source.sr is not None and reducible_spec(spec, source.dim, source.num_heads, Grid(size))
        self.ratio = source.N_ratio if kept else 1
        super().__init__(source, spec, self.reduced(Grid(size)))
        self.sr: Any = source.sr if kept else None
        self.norm: Any = source.norm if kept else None
        self.map = model.map_from(model.parent(name).patch_embed, Grid(size))

    def reduced(self, grid: Grid) -> Grid:
        """Returns the grid with the size of the averages."""
        return grid if self.ratio == 1 else Grid(grid.size, (1, grid.num_queries // self.ratio))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        grid = self.map.grid
        if self.sr is None:
            return self.mix(x, grid)
        t = self.stemmed(x, grid)
        k, v = self.kv(self.norm(self.sr(t.mT)).mT).split(self.widths[1:], -1)
        return self.project(self.attended(t, self.q(t), k, v, self.reduced(grid)), x)
