"""Key layout of the feature pyramid network of OpenMMLab's toolboxes, mmsegmentation and mmdetection."""

from linvit.weights.layouts.layout import Rename

PYRAMID: tuple[Rename, ...] = (
    (r"^neck\.lateral_convs\.(\d)\.conv\.", r"head.fpn.inner_blocks.\1.0."),
    (r"^neck\.fpn_convs\.(\d)\.conv\.", r"head.fpn.layer_blocks.\1.0."),
)
