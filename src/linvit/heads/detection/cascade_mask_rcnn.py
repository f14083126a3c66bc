"""Cascade Mask R-CNN: three stages, each refines the boxes of the previous one for a greater overlap with the truth.

Paper: Cai and Vasconcelos 2018, "Cascade R-CNN: Delving into High Quality Object Detection"; the details are those of
the Swin paper (Liu et al. 2021) in mmdetection 2.x: box heads of four convolutions and a linear layer, boxes of each
class, the generalised IoU loss, and a mask head in each stage.
"""

from collections.abc import Sequence
from typing import Any

from linvit.heads.detection.stage import StageSettings
from linvit.heads.detection.two_stage import TwoStage


class CascadeMaskRCNN(TwoStage):
    """Mask R-CNN in three stages, each on the boxes of the previous one, on the maps at a reduction of 4 or more.

    Args:
        proposals: Number of boxes for the first stage, in training and in evaluation.
    """

    with_masks = True
    cascade = (
        StageSettings(0.5, (0.1, 0.1, 0.2, 0.2), 1.0),
        StageSettings(0.6, (0.05, 0.05, 0.1, 0.1), 0.5),
        StageSettings(0.7, (0.033, 0.033, 0.067, 0.067), 0.25),
    )
    low_quality = False
    rpn_beta = 1 / 9
    inside_only = True
    box_layers = (4, 1)
    giou = True

    def __init__(
        self,
        channels: Sequence[int],
        reductions: Sequence[int],
        num_classes: int,
        *,
        proposals: Sequence[int] = (2000, 1000),
        **options: Any,
    ) -> None:
        super().__init__(channels, reductions, num_classes, proposals=proposals, **options)
