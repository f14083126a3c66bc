"""Which of the many anchors or proposals of an image take part in a loss.

Paper: Ren et al. 2015, "Faster R-CNN: Towards Real-Time Object Detection with Region Proposal Networks", Sec. 3.1.3.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from linvit.heads.detection.assign import BACKGROUND


def choose_at_random(candidates: Tensor, count: int) -> Tensor:
    """Returns `count` of the candidates (n,) at random, without replacement and in their order, or all if fewer."""
    if len(candidates) <= count:
        return candidates
    chosen = torch.randperm(len(candidates), device=candidates.device)[:count]
    return candidates[chosen.sort().values]


@dataclass
class Sampler:
    """Takes positives up to a fraction, and negatives for the rest.

    torchvision's `BalancedPositiveNegativeSampler` draws as many, but cannot be told which.

    Args:
        num: How many are taken of an image.
        fraction: The largest share of positives among them.
        choose: Takes so many of the candidates, positions (n,); in tests another than at random.
    """

    num: int
    fraction: float
    choose: Callable[[Tensor, int], Tensor] = choose_at_random

    def __call__(self, matched: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the positions of positives and negatives of what an `Assigner` returned."""
        positive = self.choose((matched >= 0).nonzero()[:, 0], int(self.num * self.fraction))
        negative = self.choose((matched == BACKGROUND).nonzero()[:, 0], self.num - len(positive))
        return positive, negative
