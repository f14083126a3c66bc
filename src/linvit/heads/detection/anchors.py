"""Anchors, their assignment to true boxes, and their sampling for a loss.

Paper: Ren et al. 2015, "Faster R-CNN: Towards Real-Time Object Detection with Region Proposal Networks", Sec. 3.1.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchvision.ops import box_iou

from linvit.heads.detection.base import Size, constants, positions

BACKGROUND = -1
IGNORED = -2


@dataclass(frozen=True)
class Anchors:
    """The anchors of mmdetection, of fixed strides.

    torchvision's `AnchorGenerator` differs: it rounds the shapes to whole pixels, and uses the quotient of image
    and map as the stride, which is 61 instead of 64 where a map's size was rounded up. The order is the same: row,
    column, ratio, scale.
    """

    strides: Sequence[int]
    scales: Sequence[float]
    ratios: Sequence[float] = (0.5, 1.0, 2.0)

    @property
    def per_cell(self) -> int:
        """Number A of anchors per cell."""
        return len(self.scales) * len(self.ratios)

    def shapes(self, stride: int, like: Tensor) -> Tensor:
        """Returns the anchors (A, 4) around the cell at 0, 0: anchors are centred at the corners of their cells."""
        roots = constants(self.ratios, like).sqrt()[:, None]  # (ratios, 1)
        sides = stride * constants(self.scales, like)[None]  # (1, scales)
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
        """Returns a mask of all anchors (n,): True at cells of the padded image, False in the padding to the batch."""
        found = []
        for feature, stride in zip(maps, self.strides, strict=True):
            on = torch.zeros(*feature.shape[-2:], self.per_cell, dtype=torch.bool, device=feature.device)
            on[: -(-padded[0] // stride), : -(-padded[1] // stride)] = True
            found.append(on.flatten())
        return torch.cat(found)

    def _grid(self, size: Size, stride: int, like: Tensor) -> Tensor:
        y, x = (stride * torch.arange(side, dtype=like.dtype, device=like.device) for side in size)
        shifts = torch.cartesian_prod(y, x).flip(1).repeat(1, 2)  # (H W, 4)
        return (shifts[:, None] + self.shapes(stride, like)).flatten(0, 1)  # (H W A, 4)


def by_anchor(maps: Tensor, values: int) -> Tensor:
    """Returns a map of A predictions of `values` numbers at each cell, (B, A values, H, W), as (B, H W A, values)."""
    found: Tensor = maps.permute(0, 2, 3, 1).unflatten(3, (-1, values)).flatten(1, 3)
    return found


@dataclass(frozen=True)
class Assigner:
    """Assigns boxes to true boxes by their intersection over union (IoU), as mmdetection's `MaxIoUAssigner`.

    With an IoU of `positive` or more, a box is assigned to the true box that it overlaps most; below `negative` it is
    background; in between it is ignored. With `low_quality` each true box also claims all boxes whose IoU with it is
    the greatest of all and at least `least`, so that every true box has a box. With `least` 0, as in RetinaNet, a true
    box that overlaps nothing claims all boxes that do not overlap it, so true boxes without an area must be removed.

    torchvision's `Matcher` differs where a true box of low overlap claims boxes: there they go to the true box
    that they overlap most, here to the one that claims them (the last of several); and it has no least overlap.
    """

    positive: float
    negative: float
    low_quality: bool = True
    least: float = 0.0

    def __call__(self, boxes: Tensor, truth: Tensor, usable: Tensor | None = None) -> Tensor:
        """Returns for each of n boxes (n, 4) the position of its true box (m, 4), or `BACKGROUND`, or `IGNORED`.

        Boxes that are not usable (n,) are ignored.
        """
        matched = self._matched(boxes, truth, usable)
        return matched if usable is None else matched.where(usable, IGNORED)

    def _matched(self, boxes: Tensor, truth: Tensor, usable: Tensor | None) -> Tensor:
        if not len(truth):
            return torch.full((len(boxes),), BACKGROUND, device=boxes.device)
        iou = box_iou(truth, boxes)  # (m, n)
        if usable is not None:
            iou = iou.where(usable, -1)
        overlap, best = iou.max(0)
        matched = torch.where(overlap < self.negative, BACKGROUND, IGNORED)
        matched = torch.where(overlap >= self.positive, best, matched)
        if self.low_quality and len(boxes):
            greatest = iou.amax(1, keepdim=True)  # (m, 1)
            claims = (iou == greatest) & (greatest >= self.least)
            last = len(truth) - 1 - claims.flip(0).byte().argmax(0)  # (n,)
            matched = torch.where(claims.any(0), last, matched)
        return matched


def choose_at_random(candidates: Tensor, count: int) -> Tensor:
    """Returns `count` of the candidates (n,) at random, without replacement and in their order, or all if fewer."""
    if len(candidates) <= count:
        return candidates
    chosen = torch.randperm(len(candidates), device=candidates.device)[:count]
    return candidates[chosen.sort().values]


@dataclass
class Sampler:
    """Samples positives up to a fraction, and negatives for the rest, by `choose` (random except in tests).

    torchvision's `BalancedPositiveNegativeSampler` draws equally many, but the choice cannot be controlled.
    """

    num: int
    fraction: float
    choose: Callable[[Tensor, int], Tensor] = choose_at_random

    def __call__(self, matched: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Returns positions of sampled positives and negatives among the results of an `Assigner` for each image."""
        found = positions([of_image >= 0 for of_image in matched] + [of_image == BACKGROUND for of_image in matched])
        chosen = []
        for positive, negative in zip(found[: len(matched)], found[len(matched) :], strict=True):
            positive = self.choose(positive, int(self.num * self.fraction))
            chosen.append((positive, self.choose(negative, self.num - len(positive))))
        return chosen
