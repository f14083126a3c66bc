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
        return upcast(self.classifier(self.pixels(features)))

    def of_class(self, features: Tensor, labels: Tensor) -> Tensor:
        """Returns the logits (n, 2 size, 2 size) for one class each, (n,), without computing the others'."""
        weight, bias = self.classifier.weight[labels, :, 0, 0], self.classifier.bias  # (n, C), (K,)
        assert bias is not None
        logits = torch.einsum("nc,nchw->nhw", weight, self.pixels(features))
        return upcast(logits) + bias[labels, None, None]

    def pixels(self, features: Tensor) -> Tensor:
        """Returns what is classified, (n, C, 2 size, 2 size)."""
        return F.relu(self.upsample(self.convs(features)), inplace=True)

    def loss(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """Returns the mean binary cross-entropy of logits (n, s, s) and true masks of 0 and 1; 0 without RoIs."""
        errors = F.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype), reduction="sum")
        return errors / max(wanted.numel(), 1)
