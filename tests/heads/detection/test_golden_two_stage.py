"""Mask R-CNN and Cascade Mask R-CNN equal mmdetection's: stages on given proposals, and whole networks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from linvit.heads.detection.base import ImageShapes
from linvit.heads.detection.detector import Detector
from linvit.heads.detection.two_stage import TwoStage
from linvit.weights.layouts.networks import RCNN
from tests.golden_files import Golden, both_precisions, of_case
from tests.heads.detection.reference import (
    ToyPyramid,
    check_detections,
    detections,
    levels,
    of_network,
    ragged,
    rpn_of,
    shapes,
    stages_of,
    truth,
    two_stage,
)


def in_stages(official: str) -> str:
    return RCNN.rename(f"roi_head.{official}").removeprefix("head.")


def roi_head(golden: Golden, dtype: torch.dtype) -> TwoStage:
    given = golden.constructor
    cascade = "Cascade" in given["type"]
    head = two_stage(cascade, [4, 4, 4, 4], given["bbox_roi_extractor"]["out_channels"], given.get("test_cfg"))
    head.stages = stages_of(given, given.get("train_cfg"))
    state = {in_stages(name): tensor for name, tensor in golden.parameters().items()}
    missing = head.load_state_dict(state, strict=False).missing_keys
    assert all(key.startswith(("fpn.", "rpn.")) for key in missing)
    return head.to(dtype)


def watched(losses: Callable[..., Any], refined: list[list[Tensor]]) -> Callable[..., Any]:
    """The same, which notes the proposals for the next stage."""

    def run(*args: Any) -> Any:
        found, following = losses(*args)
        refined.append(following)
        return found, following

    return run


@both_precisions
@of_case("det_roi_head", "det_cascade_roi_head")
def test_stages(golden: Golden, dtype: torch.dtype) -> None:
    inputs, head, images = golden.named_inputs(dtype), roi_head(golden, dtype).train(), shapes(golden)
    maps, proposals = levels(inputs, "p"), [x.detach() for x in levels(inputs, "proposals")]
    refined: list[list[Tensor]] = []
    for stage in head.stages:
        stage.losses = watched(stage.losses, refined)
    found = head.roi_losses(maps, proposals, images, truth(inputs))
    outputs = dict(found)
    for i, following in enumerate(refined[:-1]):
        outputs |= {f"refined_stage{i}_image{j}": boxes for j, boxes in enumerate(following)}
    for name, value in outputs.items():
        golden.check(f"output.{name}", value)
    assert {name for name in golden.meta["outputs"] if not name.endswith("acc")} == set(outputs)
    sum(found.values()).backward()
    for name in golden.named("grad_input."):
        golden.check(name, inputs[name.removeprefix("grad_input.")].grad)
    golden.check_parameters(head, in_stages)


@both_precisions
@of_case("det_roi_head_detect", "det_cascade_roi_head_detect")
@torch.no_grad()
def test_stages_in_evaluation(golden: Golden, dtype: torch.dtype) -> None:
    inputs, head = golden.named_inputs(dtype), roi_head(golden, dtype).eval()
    images, proposals = shapes(golden), levels(inputs, "proposals")
    padded, count = pad_sequence(proposals, batch_first=True), torch.tensor([*map(len, proposals)])
    found = head.results(levels(inputs, "p"), padded, count, ImageShapes(images))
    check_detections(golden, detections(ragged(found, images)))


def network(golden: Golden, dtype: torch.dtype) -> Detector:
    given = golden.constructor["model"]
    train, test = (golden.constructor.get(f"{which}_cfg", {}) for which in ("train", "test"))
    cascade = given["type"] == "CascadeRCNN"
    head = two_stage(cascade, given["neck"]["in_channels"], given["neck"]["out_channels"], test.get("rcnn"))
    proposals = test.get("rpn") or train["rpn_proposal"]
    head.rpn = rpn_of(given["rpn_head"], train.get("rpn"), proposals)
    head.stages = stages_of(given["roi_head"], train.get("rcnn"))
    detector = Detector(ToyPyramid(), head)
    detector.load_state_dict({RCNN.rename(name): tensor for name, tensor in golden.parameters().items()})
    return detector.to(dtype)


@both_precisions
@of_network("det_full_loss", "MaskRCNN", "CascadeRCNN")
def test_network(golden: Golden, dtype: torch.dtype) -> None:
    inputs, detector = golden.named_inputs(dtype), network(golden, dtype)
    found = detector(list(inputs["image"]), truth(inputs))
    assert {name for name in golden.meta["outputs"] if not name.endswith("acc")} == set(found)
    for name, value in found.items():
        golden.check(f"output.{name}", value)
    sum(found.values()).backward()
    golden.check("grad_input.image", inputs["image"].grad)
    golden.check_parameters(detector, RCNN.rename)


@both_precisions
@of_network("det_full_detect", "MaskRCNN", "CascadeRCNN")
@torch.no_grad()
def test_network_in_evaluation(golden: Golden, dtype: torch.dtype) -> None:
    detector, images = network(golden, dtype).eval(), golden.tensors["input.image"].to(dtype)
    found = detector(list(images), sizes=[image.original for image in shapes(golden)])
    check_detections(golden, detections(found))
