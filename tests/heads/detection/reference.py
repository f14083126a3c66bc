"""mmdetection's settings and metadata, as in the golden files, in linvit's terms."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linvit.heads.detection.anchors import Assigner, Sampler
from linvit.heads.detection.base import ImageShape
from linvit.heads.detection.box_head import BoxHead
from linvit.heads.detection.cascade_mask_rcnn import CascadeMaskRCNN
from linvit.heads.detection.mask_rcnn import MaskRCNN
from linvit.heads.detection.masks import MaskHead, paste_masks
from linvit.heads.detection.rpn import RPN
from linvit.heads.detection.stage import RoIStage
from linvit.heads.detection.two_stage import TwoStage
from linvit.weights.layouts.networks import RCNN
from tests.golden_files import FOLDER, Golden, load


def of_network(case: str, *kinds: str) -> Any:
    """Parametrises a test over `golden`: the files of this case about detectors of these types."""
    files = [load(path.stem) for path in sorted(FOLDER.glob("dense_det_full_*.safetensors"))]
    chosen = [g for g in files if g.meta["case"] == case and g.constructor["model"]["type"] in kinds]
    assert {golden.constructor["model"]["type"] for golden in chosen} == set(kinds)
    return pytest.mark.parametrize("golden", chosen, ids=lambda golden: golden.name)


def evenly(candidates: Tensor, count: int) -> Tensor:
    """The sampling of the golden files: candidates floor(j n / k)."""
    return candidates[torch.arange(count) * len(candidates) // count] if len(candidates) > count else candidates


def shapes(golden: Golden) -> list[ImageShape]:
    metas = golden.kwargs["image_metas"]
    return [ImageShape(*(tuple(meta[name]) for name in ("img_shape", "pad_shape", "ori_shape"))) for meta in metas]


def unscaled(images: Sequence[ImageShape]) -> list[ImageShape]:
    return [image._replace(original=image.size) for image in images]


def levels(inputs: Mapping[str, Tensor], prefix: str) -> list[Tensor]:
    names = sorted(name for name in inputs if name.startswith(prefix) and name[len(prefix) :].isdigit())
    return [inputs[name] for name in names]


def truth(inputs: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Targets of all images."""
    found = []
    for i in range(len(levels(inputs, "gt_boxes"))):
        target = {"boxes": inputs[f"gt_boxes{i}"].detach()}
        target["labels"] = inputs.get(f"gt_labels{i}", torch.zeros(len(target["boxes"]), dtype=torch.long))
        if f"gt_masks{i}" in inputs:
            target["masks"] = inputs[f"gt_masks{i}"]
        found.append(target)
    return found


def assigner(given: Mapping[str, Any]) -> Assigner:
    low = given.get("match_low_quality", True)
    return Assigner(given["pos_iou_thr"], given["neg_iou_thr"], low, given["min_pos_iou"])


def ragged(found: Mapping[str, Tensor], images: Sequence[ImageShape] = ()) -> list[dict[str, Tensor]]:
    """What was found in a batch, of each image; with images masks are pasted into them."""
    counts = found["num_detections"].tolist()
    kept = [{name: x[i, :n] for name, x in found.items() if x.ndim > 1} for i, n in enumerate(counts)]
    for one, image in zip(kept, images, strict=bool(images)):
        if "masks" in one:
            one["masks"] = paste_masks(one["masks"], one["boxes"], image.original)
    return kept


def detections(found: Sequence[Mapping[str, Tensor]], infix: str = "") -> dict[str, Tensor]:
    """Detections under the names of the golden files."""
    outputs = {}
    for i, of_image in enumerate(found):
        outputs[f"detections{infix}{i}"] = torch.cat([of_image["boxes"], of_image["scores"][:, None]], 1)
        outputs[f"labels{infix}{i}"] = of_image["labels"]
        if "masks" in of_image:
            outputs[f"masks{infix}{i}"] = of_image["masks"]
    return outputs


def check_detections(golden: Golden, outputs: Mapping[str, Tensor]) -> None:
    """Integers are equal, and of the pixels of masks at most one in a thousand is another."""
    assert set(outputs) == set(golden.meta["outputs"])
    for name, output in outputs.items():
        stored = golden.tensors[f"output.{name}"]
        if "masks" in name:
            assert output.shape == stored.shape
            assert (output != stored.bool()).double().mean() <= 1e-3
        elif output.is_floating_point():
            golden.check(f"output.{name}", output)
        else:
            assert torch.equal(output, stored)


class ToyPyramid(nn.Module):
    """The backbone of the whole detectors: convolutions without overlap, each with tanh."""

    def __init__(self, widths: Sequence[int] = (5, 6, 7, 8)) -> None:
        super().__init__()
        sides = (4, 2, 2, 2)
        ins = (3, *widths[:-1])
        self.convs = nn.ModuleList(nn.Conv2d(i, o, k, k) for i, o, k in zip(ins, widths, sides, strict=True))
        self.feature_info = [{"num_chs": width, "reduction": 4 * 2**i} for i, width in enumerate(widths)]

    def forward_intermediates(self, x: Tensor, indices: Sequence[int], **_: Any) -> list[Tensor]:
        maps = []
        for conv in self.convs:
            x = conv(x).tanh()
            maps.append(x)
        return [maps[i] for i in indices]


def name_of_part(official: str, prefix: str) -> str:
    """Our name within a part, such as the box head, of mmdetection's name within it."""
    ours = RCNN.rename(prefix + official)
    return re.sub(r"^head\.(rpn|stages\.0\.(box|mask)_head)\.", "", ours)


def rpn_of(
    given: Mapping[str, Any], train: Mapping[str, Any] | None = None, test: Mapping[str, Any] | None = None
) -> RPN:
    anchors, loss = given["anchor_generator"], given.get("loss_bbox", {"type": "L1Loss"})
    train, test = train or {}, test or {"nms_pre": 1000, "max_per_img": 1000}
    rpn = RPN(
        given["feat_channels"],
        anchors["strides"],
        anchor_scale=anchors["scales"][0],
        beta=loss.get("beta", 0.0),
        inside_only=train.get("allowed_border", -1) == 0,
        samples=train.get("sampler", {}).get("num", 256),
        candidates=(test["nms_pre"],) * 2,
        proposals=(test["max_per_img"],) * 2,
        drop_empty=False,
    )
    rpn.sampler.choose = evenly
    return rpn


def box_head_of(given: Mapping[str, Any]) -> BoxHead:
    loss = given["loss_bbox"]
    return BoxHead(
        given["in_channels"],
        given["num_classes"],
        convs=given.get("num_shared_convs", 0),
        fcs=given.get("num_shared_fcs", 2),
        fc_width=given["fc_out_channels"],
        size=given["roi_feat_size"],
        stds=given["bbox_coder"]["target_stds"],
        giou=loss["type"] == "GIoULoss",
        beta=loss.get("beta", 0.0),
        class_agnostic=given["reg_class_agnostic"],
    )


def mask_head_of(given: Mapping[str, Any]) -> MaskHead:
    return MaskHead(given["conv_out_channels"], given["num_classes"], convs=given["num_convs"])


def stages_of(given: Mapping[str, Any], train: Any = None) -> nn.ModuleList:
    """The stages of an official RoI head."""
    boxes = given["bbox_head"] if isinstance(given["bbox_head"], list) else [given["bbox_head"]]
    settings = train if isinstance(train, list) else [train] * len(boxes)
    extractor = given["bbox_roi_extractor"]
    stages = nn.ModuleList()
    for box_head, setting in zip(boxes, settings, strict=True):
        assign = assigner(setting["assigner"]) if setting else Assigner(0.5, 0.5)
        sampler = setting["sampler"] if setting else {"num": 512, "pos_fraction": 0.25}
        stages.append(
            RoIStage(
                box_head_of(box_head),
                mask_head_of(given["mask_head"]),
                extractor["featmap_strides"],
                assign,
                Sampler(sampler["num"], sampler["pos_fraction"], evenly),
                extractor["finest_scale"],
            )
        )
    return stages


def two_stage(cascade: bool, channels: Sequence[int], width: int, test: Mapping[str, Any] | None) -> TwoStage:
    """A detector of our class with the settings of a test; its stages are still linvit's own."""
    options = {"width": width, "fc_width": 14}
    if test:
        options |= {"score_threshold": test["score_thr"], "max_detections": test["max_per_img"]}
        options |= {"nms_threshold": test["nms"]["iou_threshold"]}
    kind = CascadeMaskRCNN if cascade else MaskRCNN
    return kind(channels, [4 * 2**i for i in range(len(channels))], 3, **options)
