"""RetinaNet equals mmdetection's: raw maps, losses and their gradients, detections by both rules, the whole network."""

from collections.abc import Mapping
from typing import Any

import torch
from torchvision.ops import sigmoid_focal_loss

from linvit.heads.detection.anchors import IGNORED, by_anchor
from linvit.heads.detection.base import ImageShapes
from linvit.heads.detection.detector import Detector
from linvit.heads.detection.retinanet import RetinaNet
from linvit.weights.layouts.networks import RETINANET
from tests.golden_files import Golden, both_precisions, of_case
from tests.heads.detection.reference import (
    ToyPyramid,
    check_detections,
    detections,
    levels,
    of_network,
    ragged,
    shapes,
    truth,
    unscaled,
)

NETWORK = "bbox_head."


def name(official: str) -> str:
    return RETINANET.rename(official)


def head_of(given: Mapping[str, Any], channels: Any = (8, 8, 8), test: Mapping[str, Any] | None = None) -> RetinaNet:
    options = {}
    if test:
        options = {"candidates": test["nms_pre"], "score_threshold": test["score_thr"]}
        options |= {"nms_threshold": test["nms"]["iou_threshold"], "max_detections": test["max_per_img"]}
    sizes = {"width": given["feat_channels"], "convs": given["stacked_convs"]}
    return RetinaNet(channels, (8, 16, 32), given["num_classes"], **sizes, **options)


@both_precisions
@of_case("det_retina_head")
def test_raw_maps(golden: Golden, dtype: torch.dtype) -> None:
    inputs, head = golden.named_inputs(dtype), head_of(golden.constructor)
    ours = lambda official: name(NETWORK + official).removeprefix("head.")  # noqa: E731
    missing = head.load_state_dict({ours(n): t for n, t in golden.parameters().items()}, strict=False).missing_keys
    assert all(key.startswith("fpn.") for key in missing)
    scores, boxes = head.to(dtype).predict(levels(inputs, "p"))
    outputs = {f"cls{i}": x for i, x in enumerate(scores)} | {f"reg{i}": x for i, x in enumerate(boxes)}
    golden.check_outputs(outputs, inputs)
    golden.check_parameters(head, ours)


@both_precisions
@of_case("det_retina_loss")
def test_losses(golden: Golden, dtype: torch.dtype) -> None:
    inputs, head, images = golden.named_inputs(dtype), head_of(golden.constructor["head"]), shapes(golden)
    scores, boxes, targets = levels(inputs, "cls"), levels(inputs, "reg"), truth(inputs)
    found = head.loss(scores, boxes, images, targets)

    anchors = torch.cat(head.anchors(scores))
    labels, weights = [], []
    for image, target in zip(images, targets, strict=True):
        matched = head.assigner(anchors, target["boxes"], head.anchors.on_image(scores, image.padded))
        label = torch.full_like(matched, head.num_classes)
        label[matched >= 0] = target["labels"][matched[matched >= 0]]
        labels.append(label)
        weights.append((matched != IGNORED).to(dtype))
    positives = [max(1, int((label < head.num_classes).sum())) for label in labels]
    wanted = torch.nn.functional.one_hot(torch.stack(labels), head.num_classes + 1)[..., :-1].to(dtype)
    logits = torch.cat([by_anchor(x.detach(), head.num_classes) for x in scores], 1)
    focal = (sigmoid_focal_loss(logits, wanted) * torch.stack(weights)[..., None]).sum((0, 2)) / sum(positives)
    by_level = torch.stack([x.sum() for x in focal.split([len(x) for x in head.anchors(scores)])])
    golden.check("output.loss_cls_levels", by_level)
    assert torch.equal(torch.stack(labels), golden.tensors["output.target_labels"])
    assert torch.equal(torch.stack(weights), golden.tensors["output.target_label_weights"].to(dtype))
    assert sum(positives) == int(golden.tensors["output.num_total_pos"])
    golden.check("output.loss_cls", found["loss_cls"])
    golden.check("output.loss_bbox", found["loss_bbox"])
    (found["loss_cls"] + found["loss_bbox"]).backward()
    for stored in golden.named("grad_input."):
        golden.check(stored, inputs[stored.removeprefix("grad_input.")].grad)


@both_precisions
@of_case("det_retina_detect", "det_retina_detect_v3")
def test_detections(golden: Golden, dtype: torch.dtype) -> None:
    inputs, images = golden.named_inputs(dtype), shapes(golden)
    head = head_of(golden.constructor["head"], test=golden.constructor["test_cfg"])
    head.candidate_rule = "pairs" if golden.meta["case"].endswith("v3") else "anchors"
    maps = levels(inputs, "cls"), levels(inputs, "reg")
    with torch.no_grad():
        plain, scaled = (ragged(head.results(*maps, ImageShapes(each))) for each in (unscaled(images), images))
    check_detections(golden, detections(plain) | detections(scaled, "_rescaled"))


def network(golden: Golden, dtype: torch.dtype) -> Detector:
    given = golden.constructor["model"]
    head = head_of(given["bbox_head"], given["neck"]["in_channels"][1:], golden.constructor.get("test_cfg"))
    detector = Detector(ToyPyramid(), head)
    detector.load_state_dict({name(official): tensor for official, tensor in golden.parameters().items()})
    return detector.to(dtype)


@both_precisions
@of_network("det_full_loss", "RetinaNet")
def test_network(golden: Golden, dtype: torch.dtype) -> None:
    inputs, detector = golden.named_inputs(dtype), network(golden, dtype)
    golden.check_outputs(detector(list(inputs["image"]), truth(inputs)), inputs)
    golden.check_parameters(detector, name)


@both_precisions
@of_network("det_full_detect", "RetinaNet")
def test_network_in_evaluation(golden: Golden, dtype: torch.dtype) -> None:
    detector, images = network(golden, dtype).eval(), golden.tensors["input.image"].to(dtype)
    with torch.no_grad():
        found = detector(list(images), sizes=[image.original for image in shapes(golden)])
    check_detections(golden, detections(found))
