"""A classifier on each feature map, whose logits are upsampled and added, as in the first FCN.

Paper: Long et al. 2015, "Fully Convolutional Networks for Semantic Segmentation", Sec. 4.2.
"""

from torch import nn
from torch.nn import functional as F

import linvit


class SkipFCN(linvit.SegmentationHead):
    """Scores on every feature map, added at the size of the finest; those of the coarsest have a loss of their own."""

    def __init__(self, channels, reductions, num_classes, *, dropout=0.1):
        super().__init__(channels, reductions, num_classes)
        self.check_pyramid(levels=2)  # the first map at a reduction of 4 or less
        self.reduction = reductions[0]
        self.dropout = nn.Dropout2d(dropout)
        self.scores = nn.ModuleList(nn.Conv2d(into, num_classes, 1) for into in channels)

    def forward(self, features):
        return self.with_auxiliary(features)[0]

    def with_auxiliary(self, features):
        maps = [score(self.dropout(x)) for score, x in zip(self.scores, features, strict=True)]  # (B, K, H_i, W_i)
        size = maps[0].shape[-2:]
        return maps[0] + sum(F.interpolate(x, size=size, mode="bilinear") for x in maps[1:]), [maps[-1]]

    def classifiers(self):
        return list(self.scores)
