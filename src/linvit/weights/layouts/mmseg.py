"""Key layout of whole networks of mmsegmentation, in which Swin's and PVT's repositories save theirs.

The keys of the backbone lie below `backbone.`, as ours do, and are of the layout of their family.
"""

from linvit.weights.layouts.layout import Layout
from linvit.weights.layouts.openmmlab import PYRAMID

LAYOUT = Layout(
    name="mmsegmentation",
    marks=(r"decode_head\.conv_seg\.weight",),
    renames=(
        (r"^auxiliary_head\.", "head.auxiliary_head."),
        (r"^decode_head\.", "head."),
        (r"^(head\..*)conv_seg\.", r"\1classifier."),
        (r"^head\.psp_modules\.(\d)\.1\.", r"head.pyramid_pooling.branches.\1."),
        (r"^head\.bottleneck\.", "head.pyramid_pooling.bottleneck."),
        *PYRAMID,
    ),
)
