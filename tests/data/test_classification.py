"""Classification data: facts, splits, samples, and what is wrong with a source."""

import collections

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

import linvit
from linvit.data import ClassificationData
from linvit.data.loading.sampler import SeededIndex
from linvit.data.transforms.classification import Augmentation
from tests.data.images import image_folder, picture, plain_table, png, save

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

    def test_they_are_grey_8x8_images(self, digits):
        assert {(image.mode, image.size) for image in digits.splits["val"]["image"]} == {("L", (8, 8))}

    def test_samples(self, digits):
        digits.setup("fit")
        sample = digits.train_set[3]
        assert sample["image"].shape == (3, 32, 32)
        assert sample["label"] == digits.splits["train"][3]["label"]
        assert (sample["index"], sample["id"]) == (3, "3")


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

    def test_a_given_validation_split_is_taken(self, tmp_path, caplog):
        folder = image_folder(tmp_path / "data", ["train", "val"])
        module = ready(folder)
        assert "held out" not in caplog.text
        assert sorted(self.ids(module.train_set)) == sorted(map(str, (folder / "train").rglob("*.png")))
        assert sorted(self.ids(module.val_set)) == sorted(map(str, (folder / "val").rglob("*.png")))

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

    def test_one_unlabelled_image_can_be_predicted(self, tmp_path):
        file = save(picture(), tmp_path / "data" / "x.png")
        assert self.ids(ready(tmp_path / "data", "predict").predict_set) == [str(file)]

    def test_unlabelled_images_can_only_be_predicted(self, tmp_path):
        for seed in range(20):
            save(picture(seed), tmp_path / "data" / f"{seed}.png")
        module = data(tmp_path / "data")
        assert (module.num_classes, module.class_names) == (None, None)
        assert data(tmp_path / "data", num_classes=4).num_classes == 4
        text = error_of(lambda: module.setup("fit"))
        assert "has no labels, so it can only be predicted" in text
        assert "one folder per class" in text

    def test_a_test_folder_alone_cannot_be_trained_on(self, tmp_path):
        folder = image_folder(tmp_path / "data", ["test"])
        assert len(ready(folder, "test").test_set) == 6
        assert error_of(lambda: ready(folder)) == f"data source '{folder}' has no train split; it has: test"


class TestFacts:
    """Number and names of classes."""

    def test_of_an_image_folder(self, tmp_path):
        module = data(image_folder(tmp_path / "data", ["train", "val"], ["cow", "ant", "bee"]))
        assert (module.num_classes, module.class_names) == (3, ["ant", "bee", "cow"])

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

    @pytest.mark.parametrize("expected", [2, 4])
    def test_another_number_than_the_configuration_says(self, tmp_path, expected):
        folder = image_folder(tmp_path / "data", ["train"], ["ant", "bee", "cow"])
        assert data(folder, num_classes=3).num_classes == 3
        assert error_of(lambda: data(folder, num_classes=expected).num_classes) == (
            f"data source '{folder}' has 3 classes, but num_classes says {expected}. "
            f"Complete the data, or set --data.num_classes=3, or null to take what it has"
        )

    @pytest.mark.parametrize(
        ("labels", "kind"), [([0.5, 1.5] * 5, "float32"), ([-1] * 10, "int64"), ([0, -1] * 5, "int64")], ids=str
    )
    def test_labels_that_are_no_class_indices(self, tmp_path, labels, kind):
        path = table(tmp_path / "x.parquet", labels, datasets.Value(kind))
        assert str(path) in error_of(lambda: data(path).num_classes)


class TestColumns:
    """Finding columns, and being told about them."""

    def test_they_are_found_by_name(self, tmp_path):
        images = [{"bytes": png(picture(seed)), "path": None} for seed in range(10)]
        kinds = {"mask": datasets.Image(), "img": datasets.Image(), "fine_label": datasets.ClassLabel(names=["a", "b"])}
        rows = {"mask": images, "img": images, "fine_label": [0, 1] * 5}
        datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).to_parquet(tmp_path / "x.parquet")
        module = data(tmp_path / "x.parquet")
        assert (module.image_column, module.label_column) == ("img", "fine_label")
        assert data(tmp_path / "x.parquet", image_column="mask").image_column == "mask"

    def test_misspelt_ones_are_user_errors(self, tmp_path):
        folder = image_folder(tmp_path / "data", ["train"])
        for option in ("image_column", "label_column"):
            text = error_of(lambda option=option: data(folder, **{option: "labell"}).splits)
            assert f"data source '{folder}' has no column 'labell'. Did you mean 'label'?" in text

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

    def test_a_table_of_another_program_has_images_too(self, tmp_path):
        path = plain_table(tmp_path / "x.parquet", 10, label=[0, 1] * 5)
        sample = ready(path, "test").test_set[0]
        assert sample["image"].shape == (3, 10, 12)


class TestImages:
    """What becomes of an image file."""

    def sample(self, image, path, **options):
        save(image, path, **options)
        return ready(path.parent.parent, "predict").predict_set[0]

    @pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA"])
    def test_any_mode_becomes_rgb(self, tmp_path, mode):
        image = picture(0, mode=mode)
        sample = self.sample(image, tmp_path / "test" / "x.png")
        expected = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        assert torch.equal(sample["image"], expected)

    def test_cmyk_becomes_rgb(self, tmp_path):
        sample = self.sample(Image.new("CMYK", (12, 10), (0, 255, 255, 0)), tmp_path / "test" / "x.jpg")
        assert sample["image"].float().mean((1, 2)).tolist() == pytest.approx([255, 0, 0], abs=12)

    @pytest.mark.parametrize("size", [(40, 10), (10, 40), (3, 3), (1, 1)], ids=str)
    def test_any_shape_becomes_the_wanted_size(self, tmp_path, size):
        assert self.sample(picture(0, *size), tmp_path / "test" / "x.png")["image"].shape == (3, 10, 12)

    def test_the_camera_s_orientation_is_followed_and_the_path_kept(self, tmp_path):
        image, exif = Image.new("RGB", (10, 12)), Image.Exif()
        image.paste((255, 255, 255), (0, 0, 10, 6))  # the upper half
        exif[0x0112] = 6  # to be turned by 90 degrees clockwise: the upper half comes to the right
        sample = self.sample(image, tmp_path / "test" / "x.jpg", exif=exif)
        assert sample["image"][0, :, 7:].float().mean() > 230
        assert sample["image"][0, :, :5].float().mean() < 25
        assert sample["id"] == str(tmp_path / "test" / "x.jpg")

    @pytest.mark.parametrize("broken", ["text", "truncated", "empty"])
    def test_a_broken_image_is_named(self, tmp_path, broken):
        folder = image_folder(tmp_path / "data", ["train", "val"])
        file = folder / "val" / "bee" / "1.png"
        whole = file.read_bytes()
        file.write_bytes({"text": b"no image", "truncated": whole[: len(whole) // 2], "empty": b""}[broken])
        samples = ready(folder).val_set
        text = error_of(lambda: [samples[i] for i in range(len(samples))])
        assert str(file) in text
        assert "cannot be decoded" in text
        assert text.endswith("Replace or remove it")

    def test_a_broken_image_in_a_table_is_named_by_its_index(self, tmp_path):
        images = [{"bytes": png(picture(0)), "path": None}, {"bytes": b"no image", "path": None}]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        rows = datasets.Dataset.from_dict({"image": images, "label": [0, 1]}, features=features)
        datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "set")
        samples = ready(tmp_path / "set").val_set
        assert "image row 1 (stored in the table) cannot be decoded" in error_of(lambda: samples[1])


def test_training_images_are_augmented_and_the_others_are_not(tmp_path):
    folder = image_folder(tmp_path / "data", ["train", "val", "test"])
    module = ClassificationData(str(folder), num_workers=0, img_size=8, augmentation=Augmentation(rotate=90))
    for stage in ("fit", "test", "predict"):
        module.setup(stage)
    assert not torch.equal(module.train_set[SeededIndex(0, 1)]["image"], module.train_set[SeededIndex(0, 2)]["image"])
    for samples in (module.val_set, module.test_set, module.predict_set):
        assert torch.equal(samples[SeededIndex(0, 1)]["image"], samples[SeededIndex(0, 2)]["image"])
        assert "device_ops" not in samples[0]
