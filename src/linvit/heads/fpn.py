"""The feature pyramid network, which detection and segmentation share.

Paper: Lin et al. 2017, "Feature Pyramid Networks for Object Detection".
"""

from collections.abc import Sequence

from torch import Tensor, nn
from torchvision.ops import FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock


class FPN(FeaturePyramidNetwork):  # type: ignore[misc]  # torchvision has no types
    """torchvision's feature pyramid on lists of maps: (B, C_i, H_i, W_i) to (B, width, H_i, W_i), the finest first.

    1 x 1 convolutions bring all maps to one width, each is added to the next finer one by nearest-neighbour upsampling
    to its size, and a 3 x 3 convolution follows. All convolutions have biases, and there is no norm. Initial weights
    are uniform (Glorot and Bengio 2010) and biases 0, as in mmdetection and mmsegmentation.

    Args:
        channels: Channels C_i of the maps.
        width: Channels of the results.
        extra_levels: torchvision's block that makes coarser maps, which follow the others; None makes none.
    """

    def __init__(self, channels: Sequence[int], width: int = 256, extra_levels: ExtraFPNBlock | None = None) -> None:
        super().__init__(list(channels), width, extra_levels)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        """Feature maps to maps of one width, as many or, with extra levels, more."""
        return list(super().forward({str(i): feature for i, feature in enumerate(features)}).values())
