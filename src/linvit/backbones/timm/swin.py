"""Attention inside windows, in Swin."""

from typing import Any

from timm.models import swin_transformer
from torch import Tensor

from linvit.attention.base import Grid
from linvit.backbones.timm.hosts import Model, ReplacedAttention
from linvit.errors import UserError
from linvit.registry import Spec


class ReplacedSwinAttention(ReplacedAttention):
    """Replaces Swin's attention inside windows. A mechanism that takes no bias gets no shift mask either."""

    sources = (swin_transformer.WindowAttention,)
    kept = ReplacedAttention.kept | {"relative_position_bias_table"}

    def __init__(self, source: Any, spec: Spec, model: Model, name: str) -> None:
        super().__init__(source, spec, Grid(tuple(source.window_size)))
        if self.stem is not None:
            raise UserError(
                f"timm's Swin hands its attention windows that are cut already, so the stem '{self.mechanism.stem}' of "
                f"{type(self.mechanism).__name__}, a convolution of the map, has no place. Set stem: none, or take "
                f"linvit's swin_tiny"
            )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B n, h w, C) -> (B n, h w, C) with a mask (n, h w, h w) for the n windows of an image."""
        height, width = self.window_size
        bias = None if mask is None else mask[:, None].repeat(len(x) // len(mask), 1, 1, 1)  # (B n, 1, h w, h w)
        return self.mix(x, Grid((height, width)), bias)
