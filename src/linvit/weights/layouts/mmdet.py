"""Key layouts of whole detectors of mmdetection, in which Swin's and PVT's repositories save theirs.

The keys of the backbone lie below `backbone.`, as ours do, and are of the layout of their family.
"""

from linvit.weights.layouts.layout import Layout, Rename

_PYRAMID: tuple[Rename, ...] = (
    (r"^neck\.lateral_convs\.(\d)\.conv\.", r"head.fpn.inner_blocks.\1.0."),
    (r"^neck\.fpn_convs\.(\d)\.conv\.", r"head.fpn.layer_blocks.\1.0."),
)

RETINANET = Layout(
    name="mmdetection's RetinaNet",
    marks=(r"bbox_head\.retina_cls\.weight",),
    renames=(
        (r"^neck\.fpn_convs\.3\.conv\.", "head.fpn.extra_blocks.p6."),
        (r"^neck\.fpn_convs\.4\.conv\.", "head.fpn.extra_blocks.p7."),
        *_PYRAMID,
        (r"^bbox_head\.cls_convs\.(\d)\.conv\.", r"head.cls_tower.\1.0."),
        (r"^bbox_head\.reg_convs\.(\d)\.conv\.", r"head.box_tower.\1.0."),
        (r"^bbox_head\.retina_cls\.", "head.classifier."),
        (r"^bbox_head\.retina_reg\.", "head.regressor."),
    ),
)
