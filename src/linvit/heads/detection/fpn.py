"""The coarser levels of a feature pyramid that RetinaNet adds.

Paper: Lin et al. 2017, "Focal Loss for Dense Object Detection", Sec. 4, footnote 2.
"""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock


class TwoMoreLevels(ExtraFPNBlock):  # type: ignore[misc]  # torchvision has no types
    """P6 and P7 by convolutions of stride 2.

    torchvision's `LastLevelP6P7` puts a ReLU between them, which mmdetection's RetinaNet has not, and takes P5 for P6
    if it has as many channels as C5.

    Args:
        channels: Channels of C5, the last map of the backbone.
        width: Channels of the pyramid.
        source: What P6 is made from: "input" (C5) or "output" (P5).
        relu: Whether a ReLU comes before P7.
    """

    def __init__(
        self, channels: int, width: int, source: Literal["input", "output"] = "input", relu: bool = False
    ) -> None:
        super().__init__()
        self.source, self.relu = source, relu
        into = channels if source == "input" else width
        self.p6, self.p7 = (nn.Conv2d(c, width, 3, stride=2, padding=1) for c in (into, width))

    def forward(self, results: list[Tensor], maps: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        """Adds P6 and P7 to the maps of the pyramid."""
        p6 = self.p6(maps[-1] if self.source == "input" else results[-1])
        p7 = self.p7(F.relu(p6) if self.relu else p6)
        return [*results, p6, p7], [*names, "p6", "p7"]
