"""The network of a backbone and a head of detection: its calls, its errors, any size, any backbone."""

import copy

import pytest
import torch

import linvit
from linvit import UserError
from linvit.heads.create import feature_maps, heads_of
from linvit.heads.detection.base import DetectionHead, ImageShape, ImageShapes
from linvit.heads.detection.boxes import BoxCoder, best_of_batch
from linvit.heads.detection.detector import Detector
from linvit.heads.detection.masks import paste_masks
from tests.families import narrow, small


def detector(head: str = "retinanet", classes: int = 3) -> Detector:
    torch.manual_seed(0)
    return linvit.create_detector(backbone=small("pvt_v2_b0"), head=narrow(head), num_classes=classes)


def target(count: int = 1) -> dict[str, torch.Tensor]:
    boxes = torch.tensor([[4.0, 5, 30, 40]]).repeat(count, 1)
    return {"boxes": boxes, "labels": torch.zeros(count, dtype=torch.long)}


IMAGE = torch.zeros(3, 50, 60)


def test_a_head_of_another_task_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"head 'upernet' is for segmentation, not for detection.*linvit.create_segment"
    ):
        linvit.create_detector(backbone="pvt_v2_b0", head="upernet", num_classes=3)
    with pytest.raises(UserError, match=r"head 'retinanet' is for detection, not for segmentation.*fcn, "):
        linvit.create_segmentor(backbone="pvt_v2_b0", head="retinanet", num_classes=3)


@pytest.mark.parametrize("head", heads_of("detection"))
def test_maps_of_patches_of_14_carry_no_pyramid(head: str) -> None:
    with pytest.raises(UserError, match=r"only maps at a reduction of 14, .* cannot be made\. Use pat"):
        linvit.create_detector({"name": "deit_tiny", "depth": 2, "patch_size": 14}, head, 3)


@pytest.mark.parametrize(
    ("images", "targets", "message"),
    [
        ([], [], "at least one image; got an empty list"),
        ([IMAGE[None]], [target()], r"image 0 is a tensor \(1, 3, 50, 60\) of float32"),
        ([IMAGE.to(torch.uint8)], [target()], "of uint8"),
        ([IMAGE], None, "in training mode a detector needs targets, .*boxes, labels per image; .* call eval"),
        ([IMAGE], [target(), target()], "1 images and 2 targets"),
        ([IMAGE], [{"boxes": torch.zeros(0, 4)}], r"image 0 needs labels, a tensor \(0,\); it has only boxes"),
        ([IMAGE], [{**target(), "boxes": torch.zeros(4)}], r"needs boxes, a tensor \(1, 4\); got \(4,\)"),
        ([IMAGE], [{**target(), "labels": torch.tensor([3])}], "labels must be between 0 and 2: .* from 3 to 3"),
    ],
)
def test_wrong_input_is_refused(images: object, targets: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        detector()(images, targets)


def test_detections_are_scaled_to_the_original_size() -> None:
    model = detector().eval()
    model.head.classifier.bias.data.normal_()
    with torch.no_grad():
        plain, scaled = (model([IMAGE + 1], sizes=sizes)[0] for sizes in (None, [(100, 180)]))
    assert len(plain["boxes"])
    assert scaled["boxes"][:, 0::2].max() > 60
    torch.testing.assert_close(scaled["scores"][0], plain["scores"][0])


def test_compile_leaves_names_and_results() -> None:
    model = detector().eval()
    names = list(model.state_dict())
    model.compile(backend="eager")
    assert list(model.state_dict()) == names
    assert model._feature_maps is not feature_maps
    assert copy.deepcopy(model)._feature_maps is feature_maps
    with torch.no_grad():
        assert model([IMAGE])[0].keys() == {"boxes", "labels", "scores"}


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"name": "retinanet", "candidate_rule": "pair"}, "candidate_rule must be one of .*Did you mean 'pairs'"),
        ({"name": "retinanet", "extra_source": "c5"}, "extra_source must be one of input, output"),
        ({"name": "retinanet", "score_threshold": 5}, "score_threshold must be a number at least 0 and below 1"),
        ({"name": "mask_rcnn", "proposals": 100}, r"proposals must be two numbers, .* as \[2000, 1000\]; got 100"),
        ({"name": "mask_rcnn", "candidates": [100, 0]}, r"an entry of candidates \[100, 0\] must be a whole number"),
        ({"name": "cascade_mask_rcnn", "roi_samples": 0}, "roi_samples must be a whole number at least 1"),
        ({"name": "faster_rcnn", "anchor_size": 8}, "takes no option 'anchor_size'. Did you mean 'anchor_scale'"),
    ],
)
def test_wrong_options_are_refused(head: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        linvit.create_head(head, channels=[8] * 4, reductions=[4, 8, 16, 32], num_classes=3)


@pytest.mark.parametrize("head", ["mask_rcnn", "cascade_mask_rcnn"])
def test_no_proposals_and_no_boxes(head: str) -> None:
    """Losses are 0, with a gradient for the stages, and there is nothing to find."""
    model = detector(head).head
    images = [ImageShape((50, 60), (64, 64), (50, 60))]
    maps = [torch.randn(1, 8, side, side, requires_grad=True) for side in (16, 8, 4, 2, 1)]
    nothing = {**target(0), "masks": torch.zeros(0, 64, 64, dtype=torch.uint8)}
    losses = model.roi_losses(maps, [torch.zeros(0, 4)], images, [nothing])
    assert all(loss.item() == 0 for loss in losses.values())
    sum(losses.values()).backward()
    assert all(parameter.grad is not None for parameter in model.stages.parameters())
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    found = model.eval().results(maps, torch.zeros(1, 1, 4), torch.zeros(1), ImageShapes(images))
    assert not found["num_detections"].any()


@pytest.mark.parametrize("head", heads_of("detection"))
def test_a_network_that_diverged_has_a_loss_that_says_so(head: str) -> None:
    """And no operator fails before: a run can skip the step."""
    model = detector(head)
    for parameter in model.head.parameters():
        parameter.data[:1] = torch.nan
    masks = torch.zeros(1, 50, 60, dtype=torch.uint8)
    losses = model([IMAGE], [{**target(), "masks": masks}])
    assert any(loss.isnan() for loss in losses.values())
    sum(losses.values()).backward()
    with torch.no_grad():
        model.eval()([IMAGE])


def test_boxes_stay_precise_under_autocast() -> None:
    """A position of 1000 pixels in bfloat16 is off by up to 4."""
    boxes = torch.tensor([[1001.0, 903.0, 1032.5, 977.25]])
    coder = BoxCoder()
    with torch.autocast("cpu", torch.bfloat16):
        decoded = coder.decode(boxes, torch.zeros(1, 4, dtype=torch.bfloat16))
    assert torch.equal(decoded, boxes)


@pytest.mark.parametrize(
    ("head", "options"),
    [
        *((head, {"candidates": [20, 20]}) for head in heads_of("detection") if head != "retinanet"),
        ("faster_rcnn", {"drop_empty": True, "anchor_scale": 0.5}),
        ("retinanet", {"candidates": 30}),
        ("retinanet", {"candidates": 30, "candidate_rule": "pairs", "anchor_scale": 0.5}),
    ],
)
@torch.no_grad()
def test_a_batch_in_tensors_of_fixed_sizes_has_the_detections_of_its_images(head: str, options: dict) -> None:
    torch.manual_seed(0)
    spec = {**narrow(head), "score_threshold": 0.2, "nms_threshold": 0.3, **options}
    model = linvit.create_detector({"name": "timm", "model": "test_resnet"}, spec, 3).eval()
    for weight in (weight for name, weight in model.head.named_parameters() if "tower" in name and weight.ndim > 1):
        torch.nn.init.kaiming_normal_(weight)  # no ties
    for parameter in (each for layer in model.head.classifiers() for each in layer.parameters()):
        parameter.copy_(0.3 * torch.randn_like(parameter))
    images = torch.randn(4, 3, 70, 97)
    got, want = model.detect_batch(images), model(list(images))
    assert {len(one["scores"]) for one in want} - {0}
    for i, one in enumerate(want):
        count = int(got["num_detections"][i])
        assert count == len(one["scores"])
        for name in ("boxes", "labels", "scores"):
            assert torch.equal(got[name][i, :count], one[name]), name
            assert not got[name][i, count:].any()
        if model.with_masks:
            pasted = paste_masks(got["masks"][i, :count], one["boxes"], (70, 97))
            assert torch.equal(pasted, one["masks"])


def test_a_head_of_ones_own_is_refused_by_name_in_a_batch() -> None:
    model = detector()
    model.head = type("Own", (DetectionHead,), {"__init__": lambda self: torch.nn.Module.__init__(self)})()
    with pytest.raises(UserError, match="a detector with Own cannot be exported: the head has no detect_batch"):
        model.eval().detect_batch(torch.randn(2, 3, 64, 64))


def test_detections_of_two_images_are_exported() -> None:
    class Best(torch.nn.Module):
        def forward(self, boxes: torch.Tensor, scores: torch.Tensor) -> dict[str, torch.Tensor]:
            return best_of_batch(boxes, scores, 0.5, 5)

    given = torch.tensor([0.0, 0, 9, 9]) + 4 * torch.rand(2, 8, 1), torch.rand(2, 8, 3)
    found, wanted = torch.export.export(Best(), given).module()(*given), Best()(*given)
    assert int(wanted["num_detections"].min()) > 0
    assert all(torch.equal(found[name][:, : wanted[name].shape[1]], wanted[name]) for name in ("boxes", "scores"))


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_backbone_finds_the_same() -> None:
    model = detector().eval()
    model.head.classifier.bias.zero_()
    image = torch.randn(3, 50, 60)
    before = model([image])[0]
    model.compile()
    after = model([image])[0]
    assert len(before["boxes"]) == 10  # as many as a narrow head returns
    torch.testing.assert_close(after["scores"], before["scores"], rtol=1e-4, atol=1e-5)
