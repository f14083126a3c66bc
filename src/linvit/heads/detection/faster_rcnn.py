"""Faster R-CNN: a network proposes boxes; linear layers on the features of each predict its class and refine it.

Paper: Ren et al. 2015, "Faster R-CNN: Towards Real-Time Object Detection with Region Proposal Networks"; on a pyramid
as in Lin et al. 2017, with the details of mmdetection 2.x.
"""

from linvit.heads.detection.two_stage import TwoStage


class FasterRCNN(TwoStage):
    """Proposals of boxes, then class and box of each: detection on the maps at a reduction of 4 or more."""
