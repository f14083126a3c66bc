"""The parts of two-stage detectors equal mmdetection's: proposals, RoI features, heads of boxes and masks, pasting."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from linvit.heads.detection.base import ImageShapes
from linvit.heads.detection.box_head import BoxHead
from linvit.heads.detection.boxes import DROPPED, best_of_batch
from linvit.heads.detection.masks import MaskHead, _from_all_pixels, mask_targets, paste_masks
from linvit.heads.detection.stage import _of_all_levels, roi_features, roi_levels
from tests.golden_files import Golden, both_precisions, of_case
from tests.heads.detection.reference import (
    box_head_of,
    check_detections,
    detections,
    levels,
    mask_head_of,
    name_of_part,
    ragged,
    rpn_of,
    shapes,
    truth,
)


def load(module: nn.Module, golden: Golden, prefix: str, dtype: torch.dtype) -> Any:
    module.load_state_dict({name_of_part(name, prefix): tensor for name, tensor in golden.parameters().items()})
    return module.to(dtype)


@both_precisions
@of_case("det_rpn_head")
def test_raw_maps_of_proposals(golden: Golden, dtype: torch.dtype) -> None:
    inputs = golden.named_inputs(dtype)
    rpn = load(rpn_of(golden.constructor), golden, "rpn_head.", dtype)
    scores, boxes = rpn(levels(inputs, "p"))
    golden.check_outputs(
        {f"cls{i}": x for i, x in enumerate(scores)} | {f"reg{i}": x for i, x in enumerate(boxes)}, inputs
    )
    golden.check_parameters(rpn, lambda name: name_of_part(name, "rpn_head."))


@both_precisions
@of_case("det_rpn_loss")
def test_losses_of_proposals(golden: Golden, dtype: torch.dtype) -> None:
    inputs, images, given = golden.named_inputs(dtype), shapes(golden), golden.constructor
    rpn = rpn_of({**given["head"], "loss_bbox": given["loss_bbox"]}, given["train_cfg"])
    scores, boxes, targets = levels(inputs, "cls"), levels(inputs, "reg"), truth(inputs)
    anchors = torch.cat(rpn.anchors(scores))
    labels, weights, counts = [], [], torch.zeros(2)
    matched = [rpn.match(scores, anchors, image, target) for image, target in zip(images, targets, strict=True)]
    for positive, negative in rpn.sampler(matched):
        label, weight = torch.ones(len(anchors), dtype=torch.long), torch.zeros(len(anchors), dtype=dtype)
        label[positive] = 0
        weight[torch.cat([positive, negative])] = 1
        labels.append(label)
        weights.append(weight)
        counts += torch.tensor([max(1, len(positive)), max(1, len(negative))])
    assert torch.equal(torch.stack(labels), golden.tensors["output.target_labels"])
    assert torch.equal(torch.stack(weights), golden.tensors["output.target_label_weights"].to(dtype))
    assert counts.tolist() == [int(golden.tensors[f"output.num_total_{which}"]) for which in ("pos", "neg")]
    found = rpn.loss(scores, boxes, images, targets)
    for name, value in found.items():
        golden.check(f"output.{name}", value)
    sum(found.values()).backward()
    for name in golden.named("grad_input."):
        golden.check(name, inputs[name.removeprefix("grad_input.")].grad)


@both_precisions
@of_case("det_rpn_proposals", "det_rpn_proposals_v3")
def test_proposals(golden: Golden, dtype: torch.dtype) -> None:
    inputs, given = golden.named_inputs(dtype), golden.constructor
    rpn = rpn_of(given["head"], test=given["proposal_cfg"]).eval()
    rpn.drop_empty = golden.meta["case"].endswith("v3")
    found = ragged(rpn.propose(levels(inputs, "cls"), levels(inputs, "reg"), ImageShapes(shapes(golden))))
    proposals = [torch.cat([one["boxes"], one["scores"].sigmoid()[:, None]], 1) for one in found]
    check_detections(golden, {f"proposals{i}": each for i, each in enumerate(proposals)})


@both_precisions
@of_case("det_roi_extract")
def test_features_of_regions(golden: Golden, dtype: torch.dtype) -> None:
    given, inputs = golden.constructor, golden.named_inputs(dtype)
    maps, rois = levels(inputs, "p"), inputs["rois"].detach()
    options = given["featmap_strides"], given["output_size"], given["finest_scale"]
    features = roi_features(maps, rois, *options)
    level = roi_levels(rois[:, 1:], given["finest_scale"], len(maps))
    assert torch.equal(_of_all_levels(maps, rois, level, options[0], options[1]), features)  # as on CUDA
    golden.check_outputs({"features": features, "level": level}, inputs)


@both_precisions
@of_case("det_bbox_head")
def test_box_head(golden: Golden, dtype: torch.dtype) -> None:
    inputs = golden.named_inputs(dtype)
    head = load(box_head_of(golden.constructor), golden, "roi_head.bbox_head.", dtype).train()
    logits, deltas = head(inputs["roi_features"])
    labels = inputs["labels"]
    wanted = inputs["gt_boxes"].detach()[labels < head.num_classes]
    found = head.loss(logits, deltas, inputs["rois"].detach()[:, 1:], labels, wanted)
    acc = 100 * (logits.argmax(1) == labels).to(dtype).mean()
    outputs = {"cls_score": logits, "bbox_pred": deltas, **found, "acc": acc}
    golden.check_outputs(outputs, inputs)
    golden.check_parameters(head, lambda name: name_of_part(name, "roi_head.bbox_head."))


@both_precisions
@of_case("det_bbox_detect")
@torch.no_grad()
def test_box_head_in_evaluation(golden: Golden, dtype: torch.dtype) -> None:
    inputs, test = golden.named_inputs(dtype), golden.constructor["test_cfg"]
    head = load(box_head_of(golden.constructor), golden, "roi_head.bbox_head.", dtype).eval()
    logits, deltas = head(inputs["roi_features"])
    found = []
    for i, image in enumerate(shapes(golden)):
        rows = inputs["rois"][:, 0] == i
        boxes = image.to_original(image.clip(head.decode(inputs["rois"][rows, 1:], deltas[rows])))
        scores = (2 * logits[rows]).softmax(1)[:, :-1]
        scores = scores.where(scores > test["score_thr"], DROPPED)
        best = best_of_batch(boxes[None], scores[None], test["nms"]["iou_threshold"], test["max_per_img"])
        found += ragged(best)
    check_detections(golden, detections(found))


@both_precisions
@of_case("det_mask_head")
def test_mask_head(golden: Golden, dtype: torch.dtype) -> None:
    inputs = golden.named_inputs(dtype)
    head: MaskHead = load(mask_head_of(golden.constructor), golden, "roi_head.mask_head.", dtype)
    boxes, matched = inputs["positive_boxes"].detach().split([3, 2]), [torch.arange(3), torch.arange(2)]
    parts = [mask_targets(inputs[f"gt_masks{i}"], boxes[i], matched[i], 28) for i in range(2)]
    labels = torch.cat([inputs[f"gt_labels{i}"] for i in range(2)])
    logits, wanted = head(inputs["roi_features"]), torch.cat(parts)
    loss = head.loss(head.of_class(inputs["roi_features"], labels), wanted)
    golden.check_outputs({"mask_logits": logits, "loss_mask": loss, "mask_targets": wanted}, inputs)
    golden.check_parameters(head, lambda name: name_of_part(name, "roi_head.mask_head."))


@both_precisions
@of_case("det_mask_paste")
@torch.no_grad()
def test_pasted_masks(golden: Golden, dtype: torch.dtype) -> None:
    inputs, image = golden.named_inputs(dtype), shapes(golden)[0]
    head: MaskHead = load(mask_head_of(golden.constructor), golden, "roi_head.mask_head.", dtype)
    labels, boxes = inputs["labels"], inputs["detections"][:, :4]
    masks = head.of_class(inputs["roi_features"], labels).sigmoid()
    rescaled = boxes / boxes.new_tensor(golden.kwargs["image_metas"][0]["scale_factor"])
    outputs: Mapping[str, Tensor] = {
        "masks_rescaled": paste_masks(masks, rescaled, image.original),
        "masks_network_size": paste_masks(masks, boxes, image.size),
    }
    check_detections(golden, outputs)


def test_masks_of_boxes_without_pixels_in_the_image_are_empty(monkeypatch) -> None:
    torch.manual_seed(0)
    boxes = torch.tensor([[3.2, 4.1, 30.7, 22.0], [5, 5, 5, 20], [60, 60, 70, 70], [-5, -9, 70, 80]])
    masks = torch.rand(len(boxes), 28, 28)
    pasted = paste_masks(masks, boxes, (50, 41))
    assert pasted.flatten(1).any(1).tolist() == [True, False, False, True]
    monkeypatch.setattr("linvit.heads.detection.masks.PIXELS", 3 * 50 * 41)
    assert torch.equal(_from_all_pixels(masks, boxes, (50, 41)), pasted)
    assert _from_all_pixels(masks[:0], boxes[:0], (50, 41)).shape == (0, 50, 41)


def test_a_box_head_without_regions_keeps_its_statistics() -> None:
    head = BoxHead(4, 3, convs=2, fcs=1, fc_width=8).train()
    logits, deltas = head(torch.zeros(0, 4, 7, 7, requires_grad=True))
    empty = torch.zeros(0, dtype=torch.long)
    found = head.loss(logits, deltas, torch.zeros(0, 4), empty, torch.zeros(0, 4))
    sum(found.values()).backward()
    assert all(parameter.grad is not None for parameter in head.parameters())
    assert all(buffer.isfinite().all() for buffer in head.buffers())
