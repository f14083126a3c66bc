"""`load_pretrained` and `import-weights` on detectors: the files of mmdetection and of torchvision."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

import linvit
from linvit import load_pretrained
from linvit.heads.detection.detector import Detector
from linvit.weights.layouts import networks
from tests.helpers import assert_near
from tests.official import fill
from tests.official.mmdet import mask_rcnn, retinanet
from tests.official.mmseg import dense_pvt, dense_swin, renamed_swin
from tests.weights.files import PVT, SWIN
from tests.weights.test_networks import by_channel

CLASSES, WIDTH = 5, 8
SWIN_CHANNELS = [24, 48, 96, 192]
NARROW = {"width": WIDTH, "fc_width": 6}
BACKBONES: dict[str, Any] = {"pvt": {"name": "pvt_tiny", **PVT}, "swin": {"name": "swin_tiny", **SWIN}}
CASES = {
    "retinanet": ("pvt", {"name": "retinanet", "width": WIDTH}, "mmdetection's RetinaNet, pvt"),
    "mask_rcnn": ("swin", {"name": "mask_rcnn", **NARROW}, "mmdetection's R-CNN, swin"),
    "cascade": ("swin", {"name": "cascade_mask_rcnn", **NARROW}, "mmdetection's R-CNN, swin"),
    "renamed": ("swin", {"name": "mask_rcnn", **NARROW}, "mmdetection's R-CNN, swin (mmsegmentation)"),
}


def state_of(case: str) -> dict[str, Tensor]:
    if case == "retinanet":
        return fill(dense_pvt(PVT) | retinanet(PVT["embed_dims"][1:], CLASSES, WIDTH))
    state = fill(dense_swin(SWIN) | mask_rcnn(SWIN_CHANNELS, CLASSES, WIDTH, 6, stages=3 if case == "cascade" else 1))
    if case != "renamed":
        return state
    merged = {name: by_channel(tensor) if ".downsample." in name else tensor for name, tensor in state.items()}
    return {renamed_swin(name) if name.startswith("backbone.") else name: tensor for name, tensor in merged.items()}


def create(case: str, classes: int = CLASSES) -> Detector:
    torch.manual_seed(0)
    family, head, _ = CASES[case]
    return linvit.create_detector(BACKBONES[family], head, classes)


@pytest.mark.parametrize("case", CASES)
def test_every_number_of_mmdetection_is_loaded(case: str) -> None:
    model, state = create(case), state_of(case)
    fresh = copy.deepcopy(model.state_dict())
    report = load_pretrained(model, {"meta": {"CLASSES": ("a",)}, "state_dict": state})
    assert (report.layout, report.fraction, report.part) == (CASES[case][2], 1, "network")
    assert (report.resized, report.initialised, report.missing, report.unexpected) == ({}, {}, {}, [])
    numbers = [own.numel() for own in model.state_dict().values() if own.is_floating_point()]
    assert sum(numbers) == sum(tensor.numel() for tensor in state.values())
    for name, own in model.state_dict().items():
        assert not own.is_floating_point() or not torch.equal(own, fresh[name]), name


def test_classifiers_of_other_classes_stay_as_built() -> None:
    """Zeros would be scores of 0.5 for every anchor of RetinaNet."""
    model = create("retinanet", classes=3)
    bias = model.head.classifier.bias.clone()
    report = load_pretrained(model, state_of("retinanet"))
    assert report.initialised["head.classifier.bias"] == "as built: the file has 45 outputs, the model 27"
    assert report.fraction == 1
    assert torch.equal(model.head.classifier.bias, bias)


@pytest.fixture(scope="module")
def theirs() -> Any:
    torch.manual_seed(0)
    body = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
    return MaskRCNN(body, num_classes=CLASSES + 1).double().eval()


def ours(classes: int = CLASSES) -> Detector:
    return linvit.create_detector({"name": "timm", "model": "resnet18"}, "mask_rcnn", classes).double().eval()


@torch.no_grad()
def test_layers_of_torchvision_compute_the_same(theirs: Any) -> None:
    model = ours()
    for parameter in theirs.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    report = load_pretrained(model, theirs.state_dict())
    assert (report.layout, report.fraction, report.missing) == ("torchvision's R-CNN", 1, {})
    images = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    maps = list(theirs.backbone(images).values())
    features = model._feature_maps(model.backbone, images, model.pyramid.indices)
    found = model.head.fpn(features)
    for one, other in zip(found, maps, strict=True):
        assert_near(one, other, 1e-9)
    for one, other in zip(model.head.rpn(found), theirs.rpn.head(maps), strict=True):
        for level, their_level in zip(one, other, strict=True):
            assert_near(level, their_level, 1e-9)
    stage, rois = model.head.stages[0], torch.randn(3, 256, 7, 7, dtype=torch.float64)
    logits, boxes = stage.box_head(rois)
    their_logits, their_boxes = theirs.roi_heads.box_predictor(theirs.roi_heads.box_head(rois))
    assert_near(logits, their_logits.roll(-1, 1), 1e-9)
    assert_near(boxes, their_boxes[:, 4:], 1e-9)
    rois = torch.randn(3, 256, 14, 14, dtype=torch.float64)
    masks = theirs.roi_heads.mask_predictor(theirs.roi_heads.mask_head(rois))
    assert_near(stage.mask_head(rois), masks[:, 1:], 1e-9)


def test_older_names_of_torchvision(theirs: Any) -> None:
    """Those of its released files."""
    state = theirs.state_dict()
    old = {}
    for name, tensor in state.items():
        name = name.replace("rpn.head.conv.0.0.", "rpn.head.conv.")
        if "fpn" in name:
            name = name.replace(".0.weight", ".weight").replace(".0.bias", ".bias")
        for i in range(4):
            name = name.replace(f"mask_head.{i}.0.", f"mask_head.mask_fcn{i + 1}.")
        old[name] = tensor
    assert old.keys() != state.keys()
    assert networks.TORCHVISION_RCNN.translate(old).keys() == networks.TORCHVISION_RCNN.translate(state).keys()


def test_the_80_classes_of_coco_in_torchvision_s_91() -> None:
    """Its classes are COCO's numbers, of which ten are of no category."""
    numbers = torch.arange(91)
    kept = networks.background_last(numbers)
    assert len(kept) == 81
    assert kept[-1] == 0
    assert kept[:12].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13]
    assert kept[-2] == 90
    by_class = networks.boxes(numbers.repeat_interleave(4))
    assert torch.equal(by_class[::4], networks.foreground(numbers))
