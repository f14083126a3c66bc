"""Mask R-CNN: Faster R-CNN with convolutions on the features of each box that predict its mask.

Paper: He et al. 2017, "Mask R-CNN"; the details are those of mmdetection 2.x, with which the PVT and Swin papers train
(Wang et al. 2021; Liu et al. 2021).
"""

from linvit.heads.detection.two_stage import TwoStage


class MaskRCNN(TwoStage):
    """Proposals of boxes, then class, box and mask of each, on the maps at a reduction of 4 or more."""

    with_masks = True
