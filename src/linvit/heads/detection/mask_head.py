"""The mask head: for each region of interest a small mask of every class.

Paper: He et al. 2017, "Mask R-CNN", Sec. 3 and Fig. 4.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.ops.precision import upcast
from linvit.heads.detection.layers import conv


class MaskHead(nn.Module):
    """Convolutions, an upsampling by 2, and a classifier of pixels: (n, C, 14, 14) to (n, K, 28, 28).

    The layers are those of torchvision's `MaskRCNNHeads` and `MaskRCNNPredictor`, without a mask of the background.

    Args:
        width: Channels C.
        num_classes: Classes K.
        convs: Convolutions 3 x 3, each with ReLU.
        size: Side of the features of a RoI; masks have twice as many.
    """

    def __init__(self, width: int, num_classes: int, *, convs: int = 4, size: int = 14) -> None:
        super().__init__()
        self.size = size
        self.convs = nn.Sequential(*(nn.Sequential(conv(width, width), nn.ReLU(inplace=True)) for _ in range(convs)))
        self.upsample = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, features: Tensor) -> Tensor:
        """Returns logits (n, K, 2 size, 2 size)."""
        x = F.relu(self.upsample(self.convs(features)), inplace=True)
        return upcast(self.classifier(x))

    def loss(self, logits: Tensor, labels: Tensor, wanted: Tensor) -> Tensor:
        """Returns the mean binary cross-entropy of the masks of the true classes; 0 without RoIs.

        Args:
            logits: (n, K, s, s).
            labels: (n,).
            wanted: 0 and 1, (n, s, s).
        """
        chosen = logits[torch.arange(len(labels), device=labels.device), labels]
        errors = F.binary_cross_entropy_with_logits(chosen, wanted.to(chosen.dtype), reduction="sum")
        return errors / max(wanted.numel(), 1)
