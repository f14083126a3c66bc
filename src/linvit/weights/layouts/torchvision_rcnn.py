"""Key layout of torchvision's Faster R-CNN and Mask R-CNN with a ResNet, also of the older names of its released files.

The background is torchvision's first class and our last, which has no box and no mask. Its released files have a class
for each of COCO's numbers up to 90, of which ten are of no category: these are left out. Anchors and RoI features are
not quite the same (see `linvit.heads.detection`), so its detectors lose a little with us, until they are trained on.
"""

import torch
from torch import Tensor

from linvit.weights.layouts.layout import Layout

NO_CATEGORY = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
"""Numbers up to 90 that no category of COCO has."""


def foreground(tensor: Tensor) -> Tensor:
    """Rows by class (K + 1, ...) without those of the background and of no category."""
    count = len(tensor)
    classes = [i for i in range(1, count) if count != 91 or i not in NO_CATEGORY]
    return tensor[classes]


def background_last(tensor: Tensor) -> Tensor:
    """Rows by class (K + 1, ...), that of the background moved from the beginning to the end."""
    return torch.cat([foreground(tensor), tensor[:1]])


def boxes(tensor: Tensor) -> Tensor:
    """Four rows by class (4 K + 4, ...), without those of the background."""
    return foreground(tensor.unflatten(0, (-1, 4))).flatten(0, 1)


LAYOUT = Layout(
    name="torchvision's R-CNN",
    marks=(r"roi_heads\.box_predictor\.cls_score\.weight", r"backbone\.body\.conv1\.weight"),
    renames=(
        (r"^backbone\.body\.", "backbone."),
        (r"^backbone\.fpn\.(inner|layer)_blocks\.(\d)\.(0\.)?", r"head.fpn.\1_blocks.\2.0."),
        (r"^rpn\.head\.conv\.(0\.0\.)?", "head.rpn.conv."),
        (r"^rpn\.head\.cls_logits\.", "head.rpn.classifier."),
        (r"^rpn\.head\.bbox_pred\.", "head.rpn.regressor."),
        (r"^roi_heads\.(box|mask)_(head|predictor)\.", r"head.stages.0.\1_head."),
        (r"box_head\.fc6\.", "box_head.fcs.0."),
        (r"box_head\.fc7\.", "box_head.fcs.1."),
        (r"box_head\.cls_score\.", "box_head.classifier."),
        (r"box_head\.bbox_pred\.", "box_head.regressor."),
        (r"mask_head\.mask_fcn(\d)\.", lambda match: f"mask_head.{int(match[1]) - 1}.0."),
        (r"mask_head\.(\d)\.0\.", r"mask_head.convs.\1.0."),
        (r"mask_head\.conv5_mask\.", "mask_head.upsample."),
        (r"mask_head\.mask_fcn_logits\.", "mask_head.classifier."),
    ),
    conversions=(
        (r"roi_heads\.box_predictor\.cls_score\.(weight|bias)", background_last),
        (r"roi_heads\.box_predictor\.bbox_pred\.(weight|bias)", boxes),
        (r"roi_heads\.mask_predictor\.mask_fcn_logits\.(weight|bias)", foreground),
    ),
)
