"""LightHam: joins the maps of a backbone and adds their non-negative low-rank approximation.

Paper: Geng et al. 2021, "Is Attention Better Than Matrix Decomposition?", for the "hamburger"; the head is that
of Guo et al. 2022, "SegNeXt", whose code PolaFormer++ uses for training.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.ops.functional import upcast, wide
from linvit.errors import check_number
from linvit.heads.layers import conv, pixel_classifier, resize
from linvit.heads.segmentation.base import SegmentationHead


class LightHam(SegmentationHead):
    """Joins the maps at a reduction of 8 or more, adds their low-rank factorisation, and classifies the sum.

    Logits have the size of the finest of these maps. In training the factorisation starts from random numbers,
    drawn in each call; in evaluation from the same numbers for all images.

    Args:
        width: Channels of all layers.
        rank: Columns of the factors.
        train_steps: Updates of both factors in training.
        eval_steps: Updates in evaluation.
        dropout: Fraction of the channels that are dropped before the classifier in training.
    """

    def __init__(
        self,
        channels: Sequence[int],
        reductions: Sequence[int],
        num_classes: int,
        *,
        width: int = 512,
        rank: int = 64,
        train_steps: int = 6,
        eval_steps: int = 7,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(channels, reductions, num_classes)
        self.reduction = reductions[0]
        self.squeeze = conv_norm(sum(channels), width)
        self.hamburger = Hamburger(width, rank, train_steps, eval_steps)
        self.align = conv_norm(width, width)
        self.dropout = nn.Dropout2d(dropout)
        self.classifier = pixel_classifier(width, num_classes)

    @classmethod
    def levels(cls, reductions: Sequence[int]) -> list[int]:
        """Returns the positions of the maps at a reduction of 8 or more; of the last if there is none."""
        return [i for i, reduction in enumerate(reductions) if reduction >= 8] or [len(reductions) - 1]

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Maps features (B, C_i, H_i, W_i), the finest first, to logits (B, K, H_0, W_0)."""
        x = torch.cat([resize(x, features[0].shape[-2:]) for x in features], 1)
        x = F.relu(self.align(self.hamburger(F.relu(self.squeeze(x)))))
        return self.classifier(self.dropout(x))  # type: ignore[no-any-return]


class Hamburger(nn.Module):
    """`relu(x + out(NMF(relu(in(x)))))` of a map (B, C, H, W), with linear layers over the channels of each pixel.

    NMF(X) is `D C^T` for X (C, N), one column per pixel, from multiplicative updates (Lee and Seung 2000) of the
    factors D (C, rank) and C (N, rank). Gradients pass through all updates.
    """

    def __init__(self, width: int, rank: int, train_steps: int, eval_steps: int) -> None:
        super().__init__()
        check_number("rank", rank, at_least=1, whole=True)
        check_number("train_steps", train_steps, at_least=0, whole=True)
        check_number("eval_steps", eval_steps, at_least=0, whole=True)
        self.rank, self.train_steps, self.eval_steps = rank, train_steps, eval_steps
        self.ham_in = conv(width, width, 1, std=(2 / width) ** 0.5)
        self.ham_out = conv_norm(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        rows = F.relu(self.ham_in(x)).flatten(2)
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):  # the meta device has no autocast
            low_rank = self.factorised(upcast(rows), self.bases(rows))
        return F.relu(x + self.ham_out(low_rank.to(rows.dtype).view_as(x)))

    def bases(self, x: Tensor) -> Tensor:
        """Returns the initial D, positive columns of length one, (B or 1, C, rank), for rows (B, C, N)."""
        shape = (x.shape[1], self.rank)
        if self.training:
            return F.normalize(torch.rand(x.shape[0], *shape, device=x.device, dtype=wide(x)), dim=1)
        scattered = torch.arange(math.prod(shape), device=x.device) * 40503 % 2**16  # by multiplicative hashing
        return F.normalize((scattered.view(1, *shape) / 2**16).to(wide(x)), dim=1)

    def factorised(self, x: Tensor, bases: Tensor) -> Tensor:
        """Returns `D C^T` (B, C, N) for rows x of that shape, starting from D."""
        bases = bases.expand(x.shape[0], -1, -1)
        weights = (x.mT @ bases).softmax(-1)  # (B, N, rank)
        for _ in range(self.train_steps if self.training else self.eval_steps):
            weights = updated(weights, x.mT, bases)
            bases = updated(bases, x, weights)
        return bases @ updated(weights, x.mT, bases).mT


def updated(factor: Tensor, x: Tensor, other: Tensor) -> Tensor:
    """Returns a factor (B, m, r) with smaller `||x - factor other^T||` for x (B, m, n), other (B, n, r)."""
    return factor * (x @ other) / (factor @ (other.mT @ other) + 1e-6)


def conv_norm(into: int, out: int) -> nn.Sequential:
    """Builds a 1 x 1 convolution and GroupNorm (32 groups at most), with mmsegmentation's names and initial values."""
    layer = nn.Conv2d(into, out, 1, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(OrderedDict(conv=layer, gn=nn.GroupNorm(math.gcd(32, out), out)))
