"""Every key layout that linvit knows, in the order in which they are tried."""

from linvit.weights.layouts import (
    cswin,
    deit,
    macunet,
    maresunet,
    mlla,
    mmdet,
    mmseg,
    pvt,
    pvt_v2,
    ravlt,
    soft,
    swin,
    torchvision_rcnn,
)
from linvit.weights.layouts.layout import Layout

LAYOUTS: tuple[Layout, ...] = (
    deit.LAYOUT,
    pvt.LAYOUT,
    pvt_v2.LAYOUT,
    pvt_v2.TIMM_LAYOUT,
    swin.SWIN,
    swin.SWIN_TIMM,
    swin.SWIN_MMSEG,
    cswin.LAYOUT,
    soft.LAYOUT,
    ravlt.LAYOUT,
    mlla.LAYOUT,
)
NETWORKS: tuple[Layout, ...] = (
    mmseg.LAYOUT,
    mmdet.RETINANET,
    mmdet.RCNN,
    torchvision_rcnn.LAYOUT,
    maresunet.LAYOUT,
    macunet.LAYOUT,
)
"""Of networks of a backbone and a head. What they make of the names of the backbone may be of a layout above."""
OWN = Layout(name="linvit", marks=(r".*",))
"""Our own names, or those of the model that is loaded: nothing to translate."""
