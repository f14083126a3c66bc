"""Scenes of digits: functions of their seeds, with labels that agree with each other."""

import pytest
import torch

from linvit.data import SegmentationData
from linvit.data.sources.scenes import Scenes, pool, scene
from linvit.errors import UserError

SIZE = (64, 96)


@pytest.fixture(scope="module")
def many():
    return [scene("train", seed, SIZE) for seed in range(60)]


def test_a_scene_is_a_function_of_its_seed():
    first, again, other = (scene("train", seed, SIZE) for seed in (5, 5, 6))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["image"], other["image"])


def test_masks_boxes_and_labels_agree(many):
    for made in many:
        image, mask, boxes, labels, masks = (made[name] for name in ("image", "mask", "boxes", "labels", "masks"))
        assert (image.shape, image.dtype, mask.shape, mask.dtype) == ((3, *SIZE), torch.uint8, SIZE, torch.uint8)
        assert len(boxes) == len(labels) == len(masks) <= 8
        assert masks.sum(0).max() <= 1  # a pixel belongs to one digit
        assert not (masks.bool() & (mask != (labels + 1)[:, None, None])).any()
        for (x1, y1, x2, y2), own in zip(boxes.int().tolist(), masks, strict=True):
            assert own.sum() == own[y1:y2, x1:x2].sum()
            for edge in (own[y1], own[y2 - 1], own[:, x1], own[:, x2 - 1]):
                assert edge.any()


def test_what_is_labelled_is_what_is_seen():
    one = Scenes(digits=(1, 1), digit_size=(0.9, 0.9))
    for seed in range(10):
        made = scene("train", seed, (96, 96), one)
        image, digit = made["image"].float(), made["mask"] > 0
        colour = image[:, digit].median(1).values[:, None, None]
        alike = (image - colour).abs().amax(0) < 20  # noise has a standard deviation of 4
        assert alike[digit].float().mean() > 0.8  # all but the edge has the colour of the digit


def test_a_digit_that_is_almost_hidden_is_no_instance():
    crowd = Scenes(digits=(30, 30), digit_size=(0.8, 0.9))
    made = scene("train", 1, SIZE, crowd)
    assert 0 < len(made["labels"]) < 15
    assert made["masks"].flatten(1).sum(1).min() > 10


def test_a_scene_may_be_empty():
    made = scene("val", 0, (40, 40), Scenes(digits=(0, 0)))
    assert (made["boxes"].shape, made["labels"].shape, made["masks"].shape) == ((0, 4), (0,), (0, 40, 40))
    assert not made["mask"].any()


def test_test_digits_are_in_no_training_scene():
    seen = {split: {image.tobytes() for image in pool(split)[0]} for split in ("train", "val", "test")}
    assert [len(pool(split)[0]) for split in seen] == [1257, 180, 360]
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["val"]


@pytest.mark.parametrize(
    "options", [{"train": 0}, {"digits": (5, 2)}, {"digit_size": (0.5, 0.2)}, {"digit_size": (0.5, 1.2)}], ids=str
)
def test_options_are_checked(options):
    with pytest.raises(UserError, match=f"scenes.{next(iter(options))}"):
        Scenes(**options)


def data(**options):
    scenes = Scenes(train=12, val=5, test=6)
    return SegmentationData(img_size=48, batch_size=4, num_workers=0, scenes=scenes, seed=1, **options)


class TestAsDataSource:
    def test_training_scenes_are_new_in_each_epoch_and_repeatable(self):
        made = data()
        made.setup("fit")
        loader = made.train_dataloader()

        def images(epoch):
            loader.sampler.set_epoch(epoch)
            return torch.cat([batch["image"] for batch in loader])

        first, other, again = images(0), images(1), images(0)
        assert first.shape == (12, 3, 48, 48)
        assert torch.equal(first, again)
        assert not {image.numpy().tobytes() for image in first} & {image.numpy().tobytes() for image in other}

    def test_validation_scenes_are_always_the_same(self):
        first, other = data(), data()
        other.seed = 2
        for made in (first, other):
            made.setup("validate")
        batches = [
            [made.on_after_batch_transfer(batch, 0) for batch in made.val_dataloader()] for made in (first, other)
        ]
        for one, two in zip(*batches, strict=True):
            assert torch.equal(one["image"], two["image"])
            assert torch.equal(one["mask"], two["mask"])
        assert batches[0][0]["id"][0] == "val_0"
        assert batches[0][0]["size"][0] == (48, 48)
        assert sum(len(batch["id"]) for batch in batches[0]) == 5
