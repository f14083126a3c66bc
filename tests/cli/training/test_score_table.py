"""What `validate` and `test` print."""

import pytest

from linvit.cli.training.score_table import published, score_table
from tests.training import TINY, tiny_task

SETTINGS = {"backbone": "swin_tiny", "attention": None, "num_classes": 1000, "img_size": 224}


def test_the_rows_are_in_order_and_the_published_number_stands_beside_ours():
    scores = {"test/loss": 0.75, "test/ema_top1": 0.8125, "test/top5": 0.9, "test/top1": 0.8, "test/score": 0.8}
    assert score_table(scores, 50_000, (0.812, "their README")).splitlines() == [
        "50000 images; published: their README",
        "                     ours         published",
        "  test/score         0.8",
        "  test/top1          0.8          0.8120",
        "  test/top5          0.9",
        "  test/loss          0.75",
        "  test/ema_top1      0.8125       0.8120",
    ]


def test_without_a_published_number():
    assert score_table({"val/top1": 0.5}, 8, None).splitlines() == [
        "8 images",
        "                     ours",
        "  val/top1           0.5",
    ]


def test_the_number_of_the_backbone_at_its_size():
    assert published(SETTINGS) == (pytest.approx(0.812), "microsoft/Swin-Transformer: MODELHUB.md")
    assert published({**SETTINGS, "backbone": {"name": "swin_tiny"}, "img_size": [224, 224]}) is not None


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
    assert published({**SETTINGS, "backbone": backbone}) == published({**SETTINGS, "backbone": backbone["name"]})
    assert published({**SETTINGS, "backbone": backbone}) is not None


@pytest.mark.parametrize(
    "change",
    [
        {"backbone": "deit_nano", "img_size": 32},
        {"backbone": "somebody_elses"},
        {"backbone": {"name": "swin_tiny", "window_size": 14}},
        {"backbone": {"name": "soft_small", "depths": [1, 3, 7, 5]}},
        {"backbone": {"name": "soft_small", "depths": [1, 3, 7, 4], "mlp_ratio": 3}},
        {"attention": "linear"},
        {"num_classes": 100},
        {"img_size": 384},
        {"img_size": [224, 192]},
    ],
    ids=str,
)
def test_no_number_for_what_nobody_published(change):
    assert published({**SETTINGS, **change}) is None


def test_the_settings_of_a_task_will_do():
    assert published(tiny_task(backbone=TINY).hparams) is None


def test_a_command_prints_it(run):
    done = run.then("test")
    lines = done.out.splitlines()
    assert "360 images" in lines
    assert [line.split()[0] for line in lines if line.startswith("  test/")] == [
        f"test/{name}" for name in ("score", "top1", "top5", "loss")
    ]
    assert (run.folder / "test_classes.csv").is_file()
    assert (run.folder / "test_confusion.png").is_file()
