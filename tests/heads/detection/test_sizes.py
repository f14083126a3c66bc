"""Parameters and multiply-accumulates of detectors are those of the papers' models."""

import pytest
import torch

import linvit
from linvit.analysis.operations import count_operations
from linvit.heads.detection.detector import Detector

PARAMETERS = {  # measured on mmdetection's models, to the last digit; the papers' tables round them
    ("retinanet", "pvt_tiny"): 22_964_724,
    ("retinanet", "pvt_small"): 34_221_300,
    ("retinanet", "pvt_medium"): 53_943_540,
    ("retinanet", "pvt_large"): 71_104_756,
    ("retinanet", "pvt_v2_b0"): 12_947_028,
    ("retinanet", "pvt_v2_b1"): 23_745_972,
    ("retinanet", "pvt_v2_b2"): 35_099_828,
    ("mask_rcnn", "pvt_tiny"): 32_882_160,
    ("mask_rcnn", "pvt_small"): 44_138_736,
    ("mask_rcnn", "pvt_medium"): 63_860_976,
    ("mask_rcnn", "pvt_v2_b0"): 23_446_096,
    ("mask_rcnn", "pvt_v2_b1"): 33_663_408,
    ("mask_rcnn", "pvt_v2_b2"): 45_017_264,
    ("mask_rcnn", "swin_tiny"): 47_794_602,
    ("mask_rcnn", "swin_small"): 69_112_506,
    ("cascade_mask_rcnn", "swin_tiny"): 85_629_804,
    ("cascade_mask_rcnn", "swin_small"): 106_947_708,
    ("cascade_mask_rcnn", "swin_base"): 144_977_002,
    ("cascade_mask_rcnn", "pvt_v2_b2"): 82_852_466,
}
QUICK = [("retinanet", "pvt_tiny"), ("mask_rcnn", "pvt_v2_b0"), ("cascade_mask_rcnn", "swin_tiny")]
OPERATIONS = {  # in G, at 800 x 1280 with 1000 boxes and 100 masks; the papers' tables say 267, 240 and 745
    ("mask_rcnn", "swin_tiny"): 266.553,
    ("mask_rcnn", "pvt_tiny"): 239.565,
    ("cascade_mask_rcnn", "swin_tiny"): 744.804,
    ("retinanet", "pvt_tiny"): 221.011,
}


def on_meta(head: str, backbone: str) -> Detector:
    with torch.device("meta"):
        return linvit.create_detector(backbone, head, num_classes=80).eval()


@pytest.mark.parametrize(
    ("head", "backbone"),
    [pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in PARAMETERS],
)
def test_parameters(head: str, backbone: str) -> None:
    parameters = on_meta(head, backbone).parameters()
    assert sum(parameter.numel() for parameter in parameters) == PARAMETERS[head, backbone]


class Layers(torch.nn.Module):
    """All layers of a detector, on features of as many boxes as the papers' count; their positions cost nothing."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: torch.Tensor) -> None:
        detector, head = self.detector, self.detector.head
        maps = head.fpn(detector._feature_maps(detector.backbone, images, detector.pyramid.indices))
        if not hasattr(head, "stages"):
            head.predict(maps)
            return
        head.rpn(maps)
        for stage in head.stages:
            stage.box_head(images.new_zeros(1000, 256, 7, 7))
            stage.mask_head(images.new_zeros(100, 256, 14, 14))


@pytest.mark.slow
@pytest.mark.parametrize(("head", "backbone"), OPERATIONS)
def test_multiply_accumulates(head: str, backbone: str) -> None:
    counted = count_operations(Layers(on_meta(head, backbone)), torch.zeros(1, 3, 800, 1280, device="meta"))
    assert counted.matmul / 1e9 == pytest.approx(OPERATIONS[head, backbone], abs=0.01)
