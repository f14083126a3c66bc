"""Parameter names of official networks of a backbone and a head, and their translation to linvit's.

In networks of mmsegmentation and mmdetection, also used by Swin's and PVT's repositories, the keys of the
backbone begin with `backbone.`, as in linvit, and have the layout of their family.
"""

import re

import torch
from torch import Tensor

from linvit.weights.layouts.layout import Layout, Rename, count_from_zero, flat

PYRAMID: tuple[Rename, ...] = (
    (r"^neck\.lateral_convs\.(\d)\.conv\.", r"head.fpn.inner_blocks.\1.0."),
    (r"^neck\.fpn_convs\.(\d)\.conv\.", r"head.fpn.layer_blocks.\1.0."),
)
"""Feature pyramid network of OpenMMLab's toolboxes."""

MMSEG = Layout(
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

NO_CATEGORY = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
"""Numbers up to 90 that are not used by a category of COCO."""


def foreground(tensor: Tensor) -> Tensor:
    """Selects the rows by class (K + 1, ...) of COCO's categories, without the background."""
    count = len(tensor)
    classes = [i for i in range(1, count) if count != 91 or i not in NO_CATEGORY]
    return tensor[classes]


def background_last(tensor: Tensor) -> Tensor:
    """Moves the row of the background from the beginning to the end of the rows by class (K + 1, ...)."""
    return torch.cat([foreground(tensor), tensor[:1]])


def boxes(tensor: Tensor) -> Tensor:
    """Selects the four rows per class (4 K + 4, ...), without those of the background."""
    return foreground(tensor.unflatten(0, (-1, 4))).flatten(0, 1)


TORCHVISION_RCNN = Layout(
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
"""torchvision's Faster R-CNN and Mask R-CNN with a ResNet, including the older names of its released files.

The background is torchvision's first class and linvit's last one, which has no box and no mask. The released files have
a class for each number up to 90, ten of them without a category in COCO: these are left out. Anchors and RoI features
differ slightly (see `linvit.heads.detection`), so these detectors lose some accuracy until they are trained further.
"""

MARESUNET = Layout(
    name="maresunet",
    marks=(r"firstconv\.weight", r"attention1\.PAM\.query_conv\.weight", r"finaldeconv1\.weight"),
    renames=(
        (r"^first(conv|bn)\.", r"backbone.\g<1>1."),
        (r"^encoder(\d)\.", r"backbone.layer\1."),
        (r"^attention(\d)\.", count_from_zero("head.skips.{}.")),
        (r"\.PAM\.(q|k|v)(?:uery|ey|alue)_conv\.", r".position_attention.\1."),
        (r"\.PAM\.", ".position_attention."),
        (r"\.CAM\.", ".channel_attention."),
        (r"\.conv1\.0\.", ".conv_in.conv."),
        (r"\.conv2P\.1\.0\.", ".position_conv.conv."),
        (r"\.conv2C\.1\.0\.", ".channel_conv.conv."),
        (r"\.conv3\.1\.0\.", ".conv_out.conv."),
        (r"^decoder(\d)\.", count_from_zero("head.decoders.{}.")),
        (r"^(head\.decoders\.\d)\.conv3\.", r"\1.conv2."),
        (r"\.deconv2\.", ".upsample."),
        (r"^finaldeconv1\.", "head.upsample."),
        (r"^finalconv2\.", "head.conv."),
        (r"^finalconv3\.", "head.classifier."),
    ),
    conversions=((r".*_conv\.weight", flat),),
)
"""MAResU-Net's official code: the whole network, with torchvision's ResNet-34 as encoder."""


def _block(match: re.Match[str]) -> str:
    """Names block j of the encoder's level i; every level but the first begins with a pooling, which is counted."""
    level, block = int(match[1]), int(match[2])
    return f"backbone.stages.{level - 1}.blocks.{block - (level > 1)}."


def _up(match: re.Match[str]) -> str:
    """Names a transposed convolution: `deconv42` ends at level 2 and begins below level 4; `deconv4` ends at 4."""
    source, target = int(match[1]), int(match[2] or match[1])
    return f"head.ups.{source}_{target - 1}."


MACUNET = Layout(
    name="macunet",
    marks=(r"conv1\.0\.squre\.weight", r"skblock1\.fc11\.weight", r"deconv41\.weight"),
    renames=(
        (r"^conv([1-5])\.(\d)\.", _block),
        (r"^conv(\d)(\d)\.1\.", lambda match: f"head.downs.{int(match[1]) - 1}_{int(match[2]) - 1}."),
        (r"^conv([6-9])\.", lambda match: f"head.blocks.{9 - int(match[1])}."),
        (r"^conv10\.", "head.classifier."),
        (r"^deconv(\d)(\d?)\.", _up),
        (r"^skblock(\d)\.", count_from_zero("head.attentions.{}.")),
        (r"\.fc1([12])\.", lambda match: f".of_means.{2 * int(match[1]) - 2}."),
        (r"\.fc2([12])\.", lambda match: f".of_maxima.{2 * int(match[1]) - 2}."),
        (r"\.squre\.", ".square."),
        (r"\.cross_ver\.", ".row."),
        (r"\.cross_hor\.", ".column."),
        (r"\.bn\.", ".norm."),
    ),
)
"""MACU-Net's official code: the whole network."""

VITDET = Layout(
    name="detectron2's ViTDet",
    marks=(r"backbone\.net\.blocks\.0\.attn\.qkv\.weight", r"backbone\.simfp_4\.0\.weight"),
    renames=(
        (r"^backbone\.net\.", "backbone."),
        (r"^backbone\.simfp_(\d)\.", lambda match: f"neck.levels.{int(match[1]) - 2}."),
        (r"^proposal_generator\.rpn_head\.conv\.conv0\.", "head.rpn.conv."),
        (r"^proposal_generator\.rpn_head\.conv\.conv1\.", "head.rpn.more.0.0."),
        (r"\.attn\.rel_pos_([hw])$", r".attn.rel_pos.\1"),
        (r"^proposal_generator\.rpn_head\.objectness_logits\.", "head.rpn.classifier."),
        (r"^proposal_generator\.rpn_head\.anchor_deltas\.", "head.rpn.regressor."),
        (r"^roi_heads\.(box|mask)_(head|predictor)\.", r"head.stages.0.\1_head."),
        (r"_head\.(?:conv|mask_fcn)(\d)\.norm\.", count_from_zero("_head.convs.{}.norm.")),
        (r"_head\.(?:conv|mask_fcn)(\d)\.", count_from_zero("_head.convs.{}.conv.")),
        (r"box_head\.fc(\d)\.", count_from_zero("box_head.fcs.{}.")),
        (r"box_head\.cls_score\.", "box_head.classifier."),
        (r"box_head\.bbox_pred\.", "box_head.regressor."),
        (r"mask_head\.deconv\.", "mask_head.upsample."),
        (r"mask_head\.predictor\.", "mask_head.classifier."),
    ),
    drops=(r"pixel_(mean|std)", r".*\.cell_anchors\..*"),
)

NETWORKS: tuple[Layout, ...] = (MMSEG, RETINANET, RCNN, TORCHVISION_RCNN, VITDET, MARESUNET, MACUNET)
"""All layouts, in the order in which they are tried. Names of the backbone may then need the layout of its family."""
