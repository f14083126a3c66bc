"""Classification data: facts, splits, samples, and what is wrong with a source."""

import collections

import datasets
import pytest
import torch

import linvit
from linvit.data import ClassificationData
from linvit.data.loading.sampler import SeededIndex
from linvit.data.transforms.classification import Augmentation
from tests.data.images import image_folder, picture, png, save

NONE = Augmentation(crop_scale=None, hflip=0)


def data(source, **options):
    """Data whose samples are plain pixels of 10x12 images."""
    plain = {"num_workers": 0, "img_size": [10, 12], "mean": [0] * 3, "std": [1] * 3, "crop_pct": 1.0}
    return ClassificationData(source=str(source), augmentation=NONE, **{**plain, **options})


def ready(source, stage="fit", **options):
    module = data(source, **options)
    module.setup(stage)
    return module


def error_of(call):
    with pytest.raises(linvit.UserError) as error:
        call()
    return str(error.value)


def table(path, labels, kind):
    """A parquet file of images that says what its columns are."""
    images = [{"bytes": png(picture(seed)), "path": None} for seed in range(len(labels))]
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    datasets.Dataset.from_dict({"image": images, "label": labels}, features=features).to_parquet(path)
    return path


class TestDigits:
    """The embedded digits are what their attribution says."""

    @pytest.fixture(scope="class")
    @classmethod
    def digits(cls):
        return ClassificationData("digits", num_workers=0, img_size=32)

    def test_facts(self, digits):
        assert {name: len(rows) for name, rows in digits.splits.items()} == {"train": 1257, "val": 180, "test": 360}
        assert digits.num_classes == 10
        assert digits.class_names == [str(digit) for digit in range(10)]
        assert (digits.image_column, digits.label_column) == ("image", "label")

    def test_no_image_is_in_two_splits(self, digits):
        rows = {name: [image.tobytes() for image in part["image"]] for name, part in digits.splits.items()}
        seen = {name: set(images) for name, images in rows.items()}
        assert not seen["train"] & seen["val"]
        assert not (seen["train"] | seen["val"]) & seen["test"]
        original = [index for part in digits.splits.values() for index in part["index"]]
        assert sorted(original) == list(range(1797))

    def test_every_split_has_every_class_in_like_shares(self, digits):
        for rows in digits.splits.values():
            counts = collections.Counter(rows["label"])
            assert set(counts) == set(range(10))
            assert max(counts.values()) <= 1.15 * min(counts.values())


class TestSplits:
    """Which images are trained, validated, tested and predicted."""

    def ids(self, samples):
        return [samples[i]["id"] for i in range(len(samples))]

    def test_a_missing_validation_split_is_cut_from_training_always_alike(self, tmp_path, caplog):
        folder = image_folder(tmp_path / "data", ["train", "test"], count=10)
        first, second = (ready(folder, val_fraction=0.2) for _ in range(2))
        assert f"data source '{folder}' has no validation split; a fraction of 0.2 of its train split" in caplog.text
        assert (len(first.train_set), len(first.val_set)) == (16, 4)
        assert self.ids(first.train_set) == self.ids(second.train_set)
        everything = sorted(map(str, (folder / "train").rglob("*.png")))
        assert sorted(self.ids(first.train_set) + self.ids(first.val_set)) == everything

    def test_what_is_cut_is_written_nowhere_and_named_by_its_row_of_the_whole(self, tmp_path):
        images = [{"bytes": b"no image", "path": f"{row}.png"} for row in range(10)]
        kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        rows = datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 5}, features=kinds)
        rows.save_to_disk(tmp_path / "set")
        before = sorted((tmp_path / "set").iterdir())
        module = ready(tmp_path / "set", val_fraction=0.3)
        assert sorted((tmp_path / "set").iterdir()) == before
        named = {error_of(lambda row=row: module.val_set[row]).partition(" cannot")[0] for row in range(3)}
        assert len(named) == 3
        assert named < {f"image row {row} ({row}.png)" for row in range(10)}

    def test_tests_use_the_test_split_and_say_so_if_there_is_none(self, tmp_path, caplog):
        whole = image_folder(tmp_path / "whole", ["train", "val", "test"])
        assert all(f"{whole}/test/" in name for name in self.ids(ready(whole, "test").test_set))
        assert "no test split" not in caplog.text
        part = image_folder(tmp_path / "part", ["train", "val"])
        assert all(f"{part}/val/" in name for name in self.ids(ready(part, "test").test_set))
        assert f"data source '{part}' has no test split; using its val split" in caplog.text

    def test_all_images_of_a_flat_folder_are_predicted(self, tmp_path, caplog):
        for seed in range(20):
            save(picture(seed), tmp_path / "data" / f"{seed:02}.png")
        module = ready(tmp_path / "data", "predict")
        assert sorted(self.ids(module.predict_set)) == sorted(map(str, (tmp_path / "data").glob("*.png")))
        assert "label" not in module.predict_set[0]
        assert "split" not in caplog.text


class TestFacts:
    """Number and names of classes."""

    def test_a_class_that_a_split_lacks_does_not_shift_the_others(self, tmp_path):
        folder = image_folder(tmp_path / "data", ["train"], ["ant", "bee", "cow"])
        image_folder(folder, ["val"], ["ant", "cow"])
        module = ready(folder)
        for samples in (module.train_set, module.val_set):
            for sample in (samples[i] for i in range(len(samples))):
                assert module.class_names[sample["label"]] in sample["id"]

    def test_of_numbered_labels(self, tmp_path):
        module = data(table(tmp_path / "x.parquet", [0, 3, 1] * 5, datasets.Value("int64")))
        assert (module.num_classes, module.class_names) == (4, None)

    def test_of_labels_that_are_words(self, tmp_path):
        module = ready(table(tmp_path / "x.parquet", ["dog", "cat"] * 10, datasets.Value("string")))
        assert (module.num_classes, module.class_names) == (2, ["cat", "dog"])
        assert {module.train_set[i]["label"] for i in range(len(module.train_set))} == {0, 1}


class TestColumns:
    """Finding columns, and being told about them."""

    def test_a_column_of_another_kind_is_no_image(self, tmp_path):
        folder = image_folder(tmp_path / "data", ["train"])
        assert "label" in error_of(lambda: ready(folder, image_column="label").train_set[0])

    def test_an_image_is_no_label(self, tmp_path):
        folder = image_folder(tmp_path / "data", ["train"])
        assert "image" in error_of(lambda: data(folder, label_column="image").num_classes)

    def test_no_image_column_at_all(self, tmp_path):
        datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}).to_parquet(tmp_path / "x.parquet")
        assert error_of(lambda: data(tmp_path / "x.parquet").image_column) == (
            f"data source '{tmp_path / 'x.parquet'}' has no image column among text, label; "
            f"name it with --data.image_column"
        )


def test_training_images_are_augmented_and_the_others_are_not(tmp_path):
    folder = image_folder(tmp_path / "data", ["train", "val", "test"])
    module = ClassificationData(str(folder), num_workers=0, img_size=8, augmentation=Augmentation(rotate=90))
    for stage in ("fit", "test", "predict"):
        module.setup(stage)
    assert not torch.equal(module.train_set[SeededIndex(0, 1)]["image"], module.train_set[SeededIndex(0, 2)]["image"])
    for samples in (module.val_set, module.test_set, module.predict_set):
        assert torch.equal(samples[SeededIndex(0, 1)]["image"], samples[SeededIndex(0, 2)]["image"])
        assert "device_ops" not in samples[0]
