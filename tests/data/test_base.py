"""What every image data module shares: loaders, preview, the checks of its arguments."""

import pytest
import torch

import linvit
from linvit.data import ClassificationData
from linvit.data.base import ImageData
from linvit.data.transforms import Augmentation
from tests.data.images import image_folder


def data(**options):
    return ClassificationData(**{"num_workers": 0, "img_size": 8, "mean": [0, 0, 0], "std": [1, 1, 1], **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), ["train", "val", "test"], count=5)  # 10 per split


def ready(folder, stage="fit", **options):
    module = data(source=str(folder), **options)
    module.setup(stage)
    return module


@pytest.mark.parametrize(("batch_size", "sizes"), [(4, [4, 4]), (5, [5, 5]), (10, [10]), (16, [10])])
def test_training_drops_the_last_incomplete_batch_unless_it_is_the_only_one(folder, batch_size, sizes):
    loader = ready(folder, batch_size=batch_size).train_dataloader()
    assert [len(batch["index"]) for batch in loader] == sizes


def test_training_is_shuffled_anew_every_epoch(folder):
    torch.manual_seed(0)
    loader = ready(folder, batch_size=10).train_dataloader()
    (first,), (second,) = ([batch["index"].tolist() for batch in loader] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second


@pytest.mark.parametrize("stage", ["val", "test", "predict"])
def test_evaluation_sees_every_image_once_in_order(folder, stage):
    module = ready(folder, {"val": "validate"}.get(stage, stage), batch_size=4)
    batches = list(getattr(module, f"{stage}_dataloader")())
    assert [len(batch["index"]) for batch in batches] == [4, 4, 2]
    assert torch.cat([batch["index"] for batch in batches]).tolist() == list(range(10))
    assert all(("label" in batch) == (stage != "predict") for batch in batches)


def test_worker_processes_load_the_same(folder):
    alone, helped = (ready(folder, "test", batch_size=4, num_workers=workers) for workers in (0, 2))
    pairs = list(zip(alone.test_dataloader(), helped.test_dataloader(), strict=True))
    assert len(pairs) == 3
    for ours, theirs in pairs:
        assert torch.equal(ours["image"], theirs["image"])
        assert torch.equal(ours["label"], theirs["label"])
        assert ours["id"] == theirs["id"]


class TestPreview:
    """What the image grid shows."""

    def test_images_are_spread_over_the_set_as_the_model_sees_them(self, folder):
        none = Augmentation(crop_scale=None, hflip=0)
        module = ready(folder, mean=[0.5] * 3, std=[0.2] * 3, augmentation=none)
        shown = module.preview(5)
        assert {name: images.shape for name, images in shown.items()} == {"train": (5, 3, 8, 8), "val": (5, 3, 8, 8)}
        for name, samples in (("train", module.train_set), ("val", module.val_set)):
            expected = torch.stack([samples[index]["image"] for index in (0, 2, 4, 6, 8)]) * 0.2 + 0.5
            assert torch.allclose(shown[name], expected.clamp(0, 1), atol=1e-6)

    def test_a_small_set_shows_each_image_once(self, folder):
        none = Augmentation(crop_scale=None, hflip=0)
        shown = ready(folder, augmentation=none).preview(32)
        for images in shown.values():
            assert len(images.unique(dim=0)) == len(images) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1; got 0"),
        ({"num_workers": -1}, "-1"),
        ({"mean": [0.5]}, "mean and std need 3 values, one per channel, std above 0; got [0.5], [1, 1, 1]"),
        ({"std": [1, 1]}, "got [0, 0, 0], [1, 1]"),
        ({"std": [1, 0, 1]}, "[1, 0, 1]"),
        ({"img_size": 0}, "0"),
        ({"img_size": [8]}, "[8]"),
        ({"img_size": [8, 8, 8]}, "[8, 8, 8]"),
        ({"eval_crop": 0.0}, "eval_crop must lie in (0, 1]; got 0.0"),
        ({"eval_crop": 1.1}, "got 1.1"),
        ({"val_fraction": 0.0}, "val_fraction must lie between 0 and 1; got 0.0"),
        ({"val_fraction": 1.0}, "got 1.0"),
    ],
    ids=str,
)
def test_mistakes_are_user_errors(options, message):
    with pytest.raises(linvit.UserError) as error:
        data(**options)
    assert message in str(error.value)


def test_the_facts_are_up_to_the_subclass():
    module = ImageData(1, 0, (4, 6), [0, 0, 0], [1, 1, 1])
    assert module.size == (4, 6)
    for fact in ("num_classes", "class_names"):
        with pytest.raises(NotImplementedError):
            getattr(module, fact)
