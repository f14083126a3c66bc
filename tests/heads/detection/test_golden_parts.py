"""The parts of detectors equal mmdetection's: pyramid, anchors, coder, assigner, losses, non-maximum suppression."""

import math
import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from linvit.heads.detection.anchors import BACKGROUND, IGNORED, Anchors
from linvit.heads.detection.base import ImageShape
from linvit.heads.detection.boxes import DROPPED, BoxCoder, best_of_batch
from linvit.heads.layers import FPN, TwoMoreLevels
from tests.golden_files import Golden, both_precisions, of_case
from tests.heads.detection.reference import assigner, ragged


def fpn_name(official: str, laterals: int) -> str:
    kind, i, end = re.fullmatch(r"(lateral|fpn)_convs\.(\d)\.conv\.(\w+)", official).groups()
    if int(i) >= laterals:
        return f"extra_blocks.p{6 + int(i) - laterals}.{end}"
    return f"{'inner' if kind == 'lateral' else 'layer'}_blocks.{i}.0.{end}"


@both_precisions
@of_case("det_fpn")
def test_pyramid(golden: Golden, dtype: torch.dtype) -> None:
    given, inputs = golden.constructor, golden.named_inputs(dtype)
    start, width = given.get("start_level", 0), given["out_channels"]
    channels = given["in_channels"][start:]
    source = given.get("add_extra_convs", "").removeprefix("on_")
    relu = given.get("relu_before_extra_convs", False)
    extra = TwoMoreLevels(channels[-1], width, source, relu) if source else LastLevelMaxPool()
    fpn = FPN(channels, width, extra)
    name = lambda official: fpn_name(official, len(channels))  # noqa: E731
    fpn.load_state_dict({name(official): tensor for official, tensor in golden.parameters().items()})
    fpn.to(dtype)
    maps = fpn(list(inputs.values())[start:])
    unused = sum(x.sum() for x in inputs.values())  # the map before the start has a gradient of 0
    golden.check_outputs({f"p{i}": x + 0 * unused for i, x in enumerate(maps)}, inputs)
    golden.check_parameters(fpn, name)


def anchors_of(given: dict) -> Anchors:
    base = given.get("octave_base_scale")
    octaves = given.get("scales_per_octave")
    scales = given.get("scales") or [base * 2 ** (i / octaves) for i in range(octaves)]
    return Anchors(given["strides"], scales, given["ratios"])


@of_case("det_anchors")
def test_anchors(golden: Golden) -> None:
    if "rpn" not in golden.constructor:
        anchors, sizes = anchors_of(golden.constructor), golden.tensors["input.feature_sizes"].tolist()
        maps = [torch.zeros(1, 1, *size) for size in sizes]
        for i, level in enumerate(anchors(maps)):
            golden.check(f"output.level{i}", level)
            golden.check(f"output.base{i}", anchors.shapes(anchors.strides[i], level))
        return
    for name in golden.meta["outputs"]:
        kind, height, width = re.fullmatch(r"(\w+)_(\d+)x(\d+)", name).groups()
        anchors = anchors_of(golden.constructor[kind])
        padded = [-(-int(side) // 32) * 32 for side in (height, width)]
        found = torch.cat(anchors([torch.zeros(1, 1, *(-(-p // s) for p in padded)) for s in anchors.strides]))
        found = found.double()
        sums = [found.shape[0], found.sum(), found.abs().sum(), found.min(), found.max()]
        golden.check(f"output.{name}", torch.tensor([float(x) for x in sums]))


@both_precisions
@of_case("det_box_coder")
def test_box_coder(golden: Golden, dtype: torch.dtype) -> None:
    inputs = golden.named_inputs(dtype)
    boxes, deltas = inputs["boxes"].detach(), inputs["deltas"]
    coder, size = BoxCoder(golden.constructor["target_stds"]), tuple(golden.kwargs["image_size"])
    image = ImageShape(size, size, size)
    by_class = coder.decode(boxes[:, None], inputs["deltas_multiclass"].view(len(boxes), -1, 4))
    outputs = {
        "encoded": coder.encode(boxes, inputs["gt"].detach()),
        "decoded": coder.decode(boxes, deltas),
        "decoded_clipped": image.clip(coder.decode(boxes, deltas)),
        "decoded_multiclass": image.clip(by_class).flatten(1),
    }
    golden.check_outputs(outputs, inputs)


@both_precisions
@of_case("det_assign")
def test_assigner(golden: Golden, dtype: torch.dtype) -> None:
    boxes, truth = (golden.tensors[f"input.{name}"].to(dtype) for name in ("boxes", "gt"))
    matched = assigner(golden.constructor)(boxes, truth)
    official = torch.where(matched == IGNORED, -1, torch.where(matched == BACKGROUND, 0, matched + 1))
    assert torch.equal(official, golden.tensors["output.gt_index"])


@both_precisions
@of_case("det_losses")
def test_losses_of_torchvision(golden: Golden, dtype: torch.dtype) -> None:
    inputs = golden.named_inputs(dtype)
    logits, pred, target = (inputs[name] for name in ("logits", "pred", "target"))
    focal, weight = golden.constructor["focal"], golden.constructor["giou"]["loss_weight"]
    wanted = F.one_hot(inputs["labels"], logits.shape[1] + 1)[:, :-1].to(dtype)
    outputs = {
        "focal": sigmoid_focal_loss(logits, wanted, focal["alpha"], focal["gamma"]),
        "smooth_l1_ninth": F.smooth_l1_loss(pred / 30, target / 30, reduction="none", beta=1 / 9),
        "smooth_l1_one": F.smooth_l1_loss(pred / 30, target / 30, reduction="none"),
        "l1": F.l1_loss(pred, target, reduction="none"),
        "giou": weight * generalized_box_iou_loss(pred, target),
    }
    golden.check_outputs(outputs, inputs)


@both_precisions
@of_case("det_nms")
def test_multiclass_nms(golden: Golden, dtype: torch.dtype) -> None:
    given = golden.constructor
    boxes, scores = (golden.tensors[f"input.{name}"].to(dtype) for name in ("boxes", "scores"))
    boxes = boxes if boxes.shape[1] == 4 else boxes.unflatten(1, (-1, 4))
    wanted = scores[:, :-1].where(scores[:, :-1] > given["score_thr"], DROPPED)
    (found,) = ragged(best_of_batch(boxes[None], wanted[None], given["iou_threshold"], given["max_per_img"]))
    golden.check("output.detections", torch.cat([found["boxes"], found["scores"][:, None]], 1))
    assert torch.equal(found["labels"], golden.tensors["output.labels"])
    assert torch.equal(kept(found, boxes, scores[:, :-1], given["score_thr"]), golden.tensors["output.kept"])


@pytest.mark.parametrize("cut", [True, False])
def test_many_boxes_are_compared_image_by_image(monkeypatch, cut):
    boxes, scores = some_boxes(3, 40)
    together = best_of_batch(boxes, scores, 0.5, 20, cut)
    monkeypatch.setattr("linvit.heads.detection.boxes.ONE_PLANE", 30)
    apart = best_of_batch(boxes, scores, 0.5, 20, cut)
    assert all(torch.equal(together[name], apart[name]) for name in together)


@pytest.mark.parametrize("first", [0.99, DROPPED, math.nan])
def test_detections_are_the_same_if_the_host_does_not_wait(first):
    """Then the first score stands for all that there are not."""
    boxes, scores = some_boxes(2, 40)
    scores[0, 0] = torch.tensor([first, DROPPED])
    cut, whole = (best_of_batch(boxes, scores, 0.5, 50, cut) for cut in (True, False))
    counts = cut["num_detections"].tolist()
    assert counts == whole["num_detections"].tolist()
    assert cut["boxes"].shape[1] == max(counts) < 40
    for name in ("boxes", "labels", "scores"):
        assert torch.equal(cut[name], whole[name][:, : max(counts)])
    for i, count in enumerate(counts):  # of one image the host knows the number
        alone = best_of_batch(boxes[i : i + 1], scores[i : i + 1], 0.5, 50)
        assert alone["num_detections"].tolist() == [count]
        assert torch.equal(alone["boxes"][0], cut["boxes"][i, :count])


def some_boxes(images: int, count: int) -> tuple[Tensor, Tensor]:
    """Boxes of 9 x 9 pixels that overlap, and scores of two classes: each box has one of them or none."""
    torch.manual_seed(0)
    corners, scores, label = 20 * torch.rand(images, count, 2), torch.rand(images, count), torch.rand(images, count)
    of_classes = [scores.where(label < 0.4, DROPPED), scores.where(label > 0.6, DROPPED)]
    return torch.cat([corners, corners + 9], -1), torch.stack(of_classes, -1)


def kept(found: dict[str, Tensor], boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """The positions of detections among the pairs of box and class above the threshold."""
    row, label = (scores > threshold).nonzero(as_tuple=True)
    pairs = torch.cat([boxes[row] if boxes.ndim == 2 else boxes[row, label], scores[row, label, None]], 1)
    detections = torch.cat([found["boxes"], found["scores"][:, None]], 1)
    return (detections[:, None] == pairs).all(-1).nonzero()[:, 1]
