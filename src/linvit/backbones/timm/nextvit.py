"""Attention of Next-ViT, whose keys are averages of neighbours in the order of tokens."""

from typing import Any

from timm.models import nextvit
from torch import Tensor

from linvit.attention.base import Grid
from linvit.backbones.timm.hosts import Model, ReplacedAttention
from linvit.layers.spatial_reduction import reducible_spec
from linvit.registry import Spec


class ReplacedNextViTAttention(ReplacedAttention):
    """Replaces Next-ViT's attention, with its averages unless the mechanism needs as many keys as queries.

    To the mechanism the averages, which run over the ends of rows, are one row of keys.
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
        """The grid with that of the averages."""
        return grid if self.ratio == 1 else grid._replace(kv_size=(1, grid.num_queries // self.ratio))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, N, C)."""
        grid = self.map.grid
        if self.sr is None:
            return self.mix(x, grid)
        t = self.stemmed(x, grid)
        k, v = self.kv(self.norm(self.sr(t.mT)).mT).split(self.widths[1:], -1)
        return self.project(self.attended(t, self.q(t), k, v, self.reduced(grid)), x)
