"""ViTDet's Mask R-CNN, for plain transformers: more convolutions than Mask R-CNN's, with LayerNorms.

Paper: Li et al. 2022, "Exploring Plain Vision Transformer Backbones for Object Detection", Appendix A.2; the layers are
detectron2's.
"""

from linvit.heads.detection.mask_rcnn import MaskRCNN


class ViTDetMaskRCNN(MaskRCNN):
    """Mask R-CNN with two convolutions for proposals, and four, with LayerNorms, before a linear layer for boxes."""

    low_quality = False
    box_layers = (4, 1)
    rpn_convs = 2
    layer_norm = True
