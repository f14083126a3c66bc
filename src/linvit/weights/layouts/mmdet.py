"""Key layouts of whole detectors of mmdetection, in which Swin's and PVT's repositories save theirs.

The keys of the backbone lie below `backbone.`, as ours do, and are of the layout of their family.
"""

from linvit.weights.layouts.layout import Layout
from linvit.weights.layouts.openmmlab import PYRAMID

RETINANET = Layout(
    name="mmdetection's RetinaNet",
    marks=(r"bbox_head\.retina_cls\.weight",),
    renames=(
        (r"^neck\.fpn_convs\.3\.conv\.", "head.fpn.extra_blocks.p6."),
        (r"^neck\.fpn_convs\.4\.conv\.", "head.fpn.extra_blocks.p7."),
        *PYRAMID,
        (r"^bbox_head\.cls_convs\.(\d)\.conv\.", r"head.cls_tower.\1.0."),
        (r"^bbox_head\.reg_convs\.(\d)\.conv\.", r"head.box_tower.\1.0."),
        (r"^bbox_head\.retina_cls\.", "head.classifier."),
        (r"^bbox_head\.retina_reg\.", "head.regressor."),
    ),
)
RCNN = Layout(
    name="mmdetection's R-CNN",
    marks=(r"roi_head\.bbox_head\.(\d\.)?fc_cls\.weight", r"rpn_head\.rpn_cls\.weight"),
    renames=(
        *PYRAMID,
        (r"^rpn_head\.rpn_(conv|cls|reg)\.", r"head.rpn.\1."),
        (r"^roi_head\.(bbox|mask)_head\.(?=\D)", r"roi_head.\1_head.0."),  # without a cascade
        (r"^roi_head\.bbox_head\.(\d)\.", r"head.stages.\1.box_head."),
        (r"^roi_head\.mask_head\.(\d)\.", r"head.stages.\1.mask_head."),
        (r"^(head\.stages\..*)\.shared_(conv|fc)s\.", r"\1.\2s."),
        (r"^(head\.stages\..*)\.fc_(cls|reg)\.", r"\1.\2."),
        (r"^(head\..*mask_head\.convs\.\d)\.conv\.", r"\1.0."),
        (r"^(head\..*)\.(cls|conv_logits)\.", r"\1.classifier."),
        (r"^(head\..*)\.reg\.", r"\1.regressor."),
    ),
)
