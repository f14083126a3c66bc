"""What every task hands on to its backbone, and what it keeps in a checkpoint."""

import pytest
import torch

import linvit
from linvit.tasks import ClassificationTask
from tests.training import CLASSES, SIDE, TINY, fit, tiny_task

PLAIN = (str, int, float, bool, type(None), torch.Tensor)


def leaves(value):
    """Everything in nested containers."""
    if isinstance(value, dict):
        return [leaf for part in (*value.keys(), *value.values()) for leaf in leaves(part)]
    if type(value) in (list, tuple, set):
        return [leaf for part in value for leaf in leaves(part)]
    return [value]


def mechanisms_of(task):
    return [type(module).__name__ for module in task.modules() if isinstance(module, linvit.Attention)]


@pytest.mark.parametrize(
    ("backbone", "attention", "expected"),
    [
        ("flatten_deit_tiny", None, ["FocusedAttention"] * 12),
        ({**TINY, "depth": 2}, ["linear", {"name": "focused"}], ["LinearAttention", "FocusedAttention"]),
    ],
    ids=str,
)
def test_the_attention_reaches_the_backbone_and_null_is_its_own(backbone, attention, expected):
    assert mechanisms_of(tiny_task(backbone=backbone, attention=attention, img_size=32)) == expected


@pytest.mark.parametrize(("img_size", "grid"), [([16, 32], (4, 8))], ids=str)
def test_the_image_size_reaches_the_backbone(img_size, grid):
    task = tiny_task(img_size=img_size)
    assert task.network.grid.size == grid
    assert task.example_images.shape == (1, 3, 4 * grid[0], 4 * grid[1])
    assert task(task.example_images).shape == (1, CLASSES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone_lr_scale": 0}, "backbone_lr_scale must be a number above 0; got 0"),
        ({"img_size": [16]}, "[16]"),
        (
            {"backbone": {"name": "timm", "model": "resnet18"}, "attention": "linear"},
            "no attention that linvit can replace",
        ),
    ],
    ids=str,
)
def test_mistakes_are_user_errors(options, message):
    with pytest.raises(linvit.UserError) as error:
        tiny_task(**options)
    assert message in str(error.value)


OPTIONS = {
    "backbone": {**TINY, "depth": 2},
    "attention": ["linear", {"name": "focused", "focusing_factor": 4}],
    "class_names": [str(i) for i in range(CLASSES)],
    "img_size": [SIDE, SIDE],
    "betas": (0.9, 0.95),
    "label_smoothing": 0.2,
    "mixup_alpha": 0.5,
}


class TestCheckpoint:
    """A checkpoint of a run opens safely and is complete."""

    @pytest.fixture(scope="class")
    @classmethod
    def saved(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("run")
        task = tiny_task(**OPTIONS)
        fit(task, folder).save_checkpoint(folder / "x.ckpt")
        return task, folder / "x.ckpt"

    def test_it_holds_plain_values_and_tensors_only(self, saved):
        content = torch.load(saved[1], weights_only=True)
        strange = {type(leaf) for leaf in leaves(content) if type(leaf) not in PLAIN}
        assert not strange
        assert content["global_step"] == 2

    def test_it_holds_every_argument_as_given(self, saved):
        kept = torch.load(saved[1], weights_only=True)["hyper_parameters"]
        assert {name: kept[name] for name in OPTIONS} == OPTIONS
        assert kept["num_classes"] == CLASSES
        assert kept["warmup_epochs"] == 5  # a default

    def test_it_loads_into_an_equal_task(self, saved):
        task, path = saved
        twin = ClassificationTask.load_from_checkpoint(path, weights_only=True)
        assert dict(twin.hparams) == dict(task.hparams)
        assert mechanisms_of(twin) == ["LinearAttention", "FocusedAttention"]
        images = torch.randn(2, 3, SIDE, SIDE)
        assert torch.equal(twin.eval()(images), task.eval()(images))
