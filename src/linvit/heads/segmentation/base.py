"""Base class of all heads of semantic segmentation."""

from collections.abc import Sequence

from torch import Tensor, nn

from linvit.heads.base import Head


class SegmentationHead(Head):
    """Maps the feature maps of a backbone to logits of every pixel.

    A subclass defines a constructor that takes `channels`, `reductions` and `num_classes` and calls this one, and a
    `forward`; options are keyword arguments with defaults. Its last layer is named `classifier`. Maps may be of any
    size: where a side of the image is not a multiple of a reduction, a map's side is that quotient rounded up, or down
    in CSWin and some of timm's models.

    Attributes:
        reduction: Image side over the logits' side: 4, unless a head sets another.
        classifier: The last layer, which has one output channel per class. A checkpoint of other classes fits all
            layers but this one.
    """

    task = "segmentation"
    maker = "create_segmentor"
    classifier: nn.Module

    def __init__(self, channels: Sequence[int], reductions: Sequence[int], num_classes: int) -> None:
        super().__init__(channels, reductions, num_classes)
        self.reduction = 4

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Maps features (B, C_i, H_i, W_i), the finest first, to logits (B, K, H / reduction, W / reduction)."""
        raise NotImplementedError(f"{type(self).__name__} has no forward")

    def with_auxiliary(self, features: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Returns the logits and those of auxiliary outputs, for the loss of training.

        Auxiliary logits are (B, K, h, w) of any size. The default, without auxiliary outputs, returns an empty list.
        """
        return self(features), []

    def classifiers(self) -> list[nn.Module]:
        """Returns all layers with one output channel per class, including those of auxiliary outputs."""
        return [self.classifier]
