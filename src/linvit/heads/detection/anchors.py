"""Anchors: the boxes of fixed shapes at every cell of every feature map, from which detectors predict.

Paper: Ren et al. 2015, "Faster R-CNN: Towards Real-Time Object Detection with Region Proposal Networks", Sec. 3.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linvit.heads.detection.base import Size


@dataclass(frozen=True)
class Anchors:
    """The anchors of mmdetection, of fixed strides.

    torchvision's `AnchorGenerator` is another: it rounds the shapes to whole pixels, and takes the quotient of image
    and map for the stride, which is 61 instead of 64 where a map's size was rounded up. Their order is the same: row,
    column, ratio, scale.
    """

    strides: Sequence[int]
    scales: Sequence[float]
    ratios: Sequence[float] = (0.5, 1.0, 2.0)

    @property
    def per_cell(self) -> int:
        """The number A of anchors at a cell."""
        return len(self.scales) * len(self.ratios)

    def shapes(self, stride: int, like: Tensor) -> Tensor:
        """Returns the anchors (A, 4) around the cell at 0, 0: anchors are centred at the corners of their cells."""
        roots = like.new_tensor(self.ratios).sqrt()[:, None]  # (ratios, 1)
        sides = stride * like.new_tensor(self.scales)[None]  # (1, scales)
        half = torch.stack([sides / roots, sides * roots], -1).flatten(0, 1) / 2  # (A, 2), width and height
        return torch.cat([-half, half], 1)

    def __call__(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Returns the anchors (H_i W_i A, 4) of maps (B, C, H_i, W_i), in float32 for maps of any dtype."""
        like = maps[0].new_empty(0, dtype=torch.float32)
        return [
            self._grid((feature.shape[-2], feature.shape[-1]), stride, like)
            for feature, stride in zip(maps, self.strides, strict=True)
        ]

    def on_image(self, maps: Sequence[Tensor], padded: Size) -> Tensor:
        """Returns which of all anchors (n,) are at cells of the padded image, not of the padding to the batch."""
        found = []
        for feature, stride in zip(maps, self.strides, strict=True):
            on = torch.zeros(*feature.shape[-2:], self.per_cell, dtype=torch.bool, device=feature.device)
            on[: -(-padded[0] // stride), : -(-padded[1] // stride)] = True
            found.append(on.flatten())
        return torch.cat(found)

    def _grid(self, size: Size, stride: int, like: Tensor) -> Tensor:
        y, x = (stride * torch.arange(side, dtype=like.dtype, device=like.device) for side in size)
        shifts = torch.stack([x.repeat(len(y)), y.repeat_interleave(len(x))], 1).repeat(1, 2)  # (H W, 4)
        return (shifts[:, None] + self.shapes(stride, like)).flatten(0, 1)  # (H W A, 4)


def by_anchor(maps: Tensor, values: int) -> Tensor:
    """Returns a map of A predictions of some values at each cell, (B, A values, H, W), as (B, H W A, values)."""
    return maps.permute(0, 2, 3, 1).reshape(len(maps), -1, values)
