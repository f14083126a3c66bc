"""The published accuracy of a model: only for the very model that was published."""

import pytest
import torch

import linvit
from linvit.analysis import num_parameters
from linvit.tasks.published import PublishedScores, published_ap, published_miou, published_top1
from tests.training import TINY, tiny_task

SETTINGS = {"backbone": "swin_tiny", "attention": None, "num_classes": 1000, "img_size": 224}


def test_the_number_of_the_backbone_at_its_size():
    assert published_top1(SETTINGS) == PublishedScores(
        {"top1": pytest.approx(0.812)}, "microsoft/Swin-Transformer: MODELHUB.md"
    )
    assert published_top1({**SETTINGS, "backbone": {"name": "swin_tiny"}, "img_size": [224, 224]}) is not None


@pytest.mark.parametrize(
    "backbone",
    [
        {"name": "swin_tiny", "depths": [2, 2, 6, 2], "window_size": 7},
        {"name": "soft_small", "depths": [1, 3, 20, 4]},
        {"name": "soft_small", "depths": [1, 3, 7, 4]},
        {"name": "soft_norm_small", "depths": [1, 3, 7, 4]},
    ],
    ids=str,
)
def test_options_that_make_no_other_model_keep_its_number(backbone):
    """SOFT-Small is published with code of one size and a README that tells another's."""
    assert published_top1({**SETTINGS, "backbone": backbone}) == published_top1(
        {**SETTINGS, "backbone": backbone["name"]}
    )
    assert published_top1({**SETTINGS, "backbone": backbone}) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"backbone": "deit_nano", "img_size": 32},
        {"backbone": {"name": "swin_tiny", "window_size": 14}},
        {"backbone": {"name": "soft_small", "depths": [1, 3, 7, 4], "mlp_ratio": 3}},
        {"attention": "linear"},
        {"num_classes": 100},
        {"img_size": 384},
    ],
    ids=str,
)
def test_no_number_for_what_nobody_published(change):
    assert published_top1({**SETTINGS, **change}) is None


def test_a_task_asks_for_its_own_model():
    assert tiny_task(backbone=TINY).published() is None
    assert tiny_task(backbone="deit_tiny", num_classes=1000, img_size=224).published().scores == {"top1": 0.722}


ADE20K = {"backbone": "swin_tiny", "head": "upernet", "attention": None, "num_classes": 150, "img_size": 512}


def test_the_mean_iou_of_a_backbone_under_a_head():
    assert published_miou(ADE20K).scores == {"mIoU": pytest.approx(0.4451)}
    spelled_out = {"backbone": {"name": "swin_tiny", "window_size": 7}, "head": {"name": "upernet", "width": 512}}
    assert published_miou({**ADE20K, **spelled_out}) == published_miou(ADE20K)


@pytest.mark.parametrize(
    "change",
    [
        {"head": "semantic_fpn"},
        {"head": {"name": "upernet", "width": 256}},
        {"backbone": {"name": "swin_tiny", "window_size": 14}},
        {"attention": "linear"},
        {"num_classes": 151},
        {"img_size": 640},
    ],
    ids=str,
)
def test_no_mean_iou_of_what_nobody_published(change):
    assert published_miou({**ADE20K, **change}) is None


COCO = {
    "backbone": "swin_tiny",
    "head": "mask_rcnn",
    "attention": None,
    "num_classes": 80,
    "decay_epochs": [27, 33],
}


def test_the_average_precision_of_a_backbone_under_a_head():
    assert published_ap(COCO).scores == {"box_AP": pytest.approx(0.46), "mask_AP": pytest.approx(0.416)}
    assert published_ap({**COCO, "decay_epochs": [8.0, 11.0]}).scores["box_AP"] == pytest.approx(0.437)
    plain = published_ap({**COCO, "backbone": "pvt_tiny", "head": "retinanet", "decay_epochs": [8, 11]})
    assert plain.scores == {"box_AP": pytest.approx(0.367)}


@pytest.mark.parametrize(
    "change",
    [{"head": "retinanet"}, {"attention": "linear"}, {"num_classes": 10}, {"decay_epochs": []}],
    ids=str,
)
def test_no_average_precision_of_what_nobody_published(change):
    assert published_ap({**COCO, **change}) is None


SOFT_SMALL = {"name": "soft_norm_small", "depths": [1, 3, 7, 4]}


def test_the_scores_of_dense_soft_small_belong_to_the_size_that_is_published_with_them():
    """34, 44 and 54 million parameters: not those of the depths in the code, which are the preset's."""
    one_times = {**COCO, "decay_epochs": [8, 11]}
    models = {
        33_847_064: (published_ap, {**one_times, "head": "retinanet"}, linvit.create_detector),
        43_764_500: (published_ap, {**one_times, "head": "mask_rcnn"}, linvit.create_detector),
        54_084_944: (published_miou, ADE20K, linvit.create_segmentor),
    }
    for parameters, (published, settings, create) in models.items():
        assert published({**settings, "backbone": SOFT_SMALL}) is not None
        assert published({**settings, "backbone": "soft_norm_small"}) is None
        with torch.device("meta"):
            model = create(backbone=SOFT_SMALL, head=settings["head"], num_classes=settings["num_classes"])
        assert num_parameters(model) == parameters
