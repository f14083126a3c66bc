"""How a box is told relative to another one, from which a network predicts it.

Paper: Girshick et al. 2014, "Rich feature hierarchies for accurate object detection and semantic segmentation", App. C.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from linvit.attention.ops.precision import upcast

LARGEST = math.log(1000 / 16)
"""The largest absolute logarithm of a quotient of sides: a box of 16 pixels becomes one of 1000 at most."""


@dataclass(frozen=True)
class BoxCoder:
    """Boxes as offsets of the centre and logarithms of the sides, each over a standard deviation.

    Encoding equals that of torchvision's `BoxCoder` with the reciprocals for weights. Decoding does not, which bounds
    the logarithms from above alone; mmdetection, and so this one, bounds them on both sides.

    Args:
        stds: Standard deviations of x, y, width and height.
    """

    stds: Sequence[float] = (1.0, 1.0, 1.0, 1.0)

    def encode(self, boxes: Tensor, targets: Tensor) -> Tensor:
        """Returns what leads from boxes (n, 4) to targets (n, 4), as (n, 4)."""
        centre, size = _centre_and_size(boxes)
        target_centre, target_size = _centre_and_size(targets)
        deltas = torch.cat([(target_centre - centre) / size, (target_size / size).log()], 1)
        return deltas / deltas.new_tensor(self.stds)

    def decode(self, boxes: Tensor, deltas: Tensor) -> Tensor:
        """Returns the boxes (..., 4) to which deltas (..., 4) lead from boxes (..., 4), in float32 or more."""
        deltas = upcast(deltas)
        deltas = deltas * deltas.new_tensor(self.stds)
        centre, size = _centre_and_size(boxes)
        centre = centre + size * deltas[..., :2]
        half = size * deltas[..., 2:].clamp(-LARGEST, LARGEST).exp() / 2
        return torch.cat([centre - half, centre + half], -1)


def _centre_and_size(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Returns centres (..., 2) and sides (..., 2) of boxes (..., 4)."""
    boxes = upcast(boxes)
    return (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
