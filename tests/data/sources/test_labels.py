"""Labels are held against the classes before the first step."""

import datasets
import pytest
from lightning.pytorch import Trainer

import linvit
from linvit.data import ClassificationData
from linvit.data.sources.labels import (
    check_label,
    check_labels,
    check_same_classes,
    check_trained_classes,
    count_classes,
    places_of,
)
from linvit.tasks import ClassificationTask
from tests.data.images import image_folder, picture, plain_table, png, save


def table(labels, paths=True):
    images = [{"bytes": b"", "path": f"{row}.jpg" if paths else None} for row in range(len(labels))]
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict({"image": images, "label": labels}, features=kinds)


def error_of(call, *args):
    with pytest.raises(linvit.UserError) as error:
        call(*args)
    return str(error.value)


def test_the_first_rows_outside_are_named():
    labels = [0, 4, 1, -1, None, 9, 9, 9, 9]
    assert error_of(check_labels, table(labels), "image", "label", 4, "val", "here") == (
        "7 of 9 labels in the val split of 'here' are outside the 4 classes, 0 to 3: row 1 (1.jpg) has 4, "
        "row 3 (3.jpg) has -1, row 4 (4.jpg) has None, row 5 (5.jpg) has 9, row 6 (6.jpg) has 9, and 2 more. "
        "Repair or remove these rows"
    )


@pytest.mark.parametrize(
    ("label", "way"), [(None, "its row"), (-1, "its row"), (4, "its row, or set --data.num_classes")]
)
def test_of_one_label_only_one_that_is_too_large_may_be_right(label, way):
    assert error_of(check_label, label, "1.jpg", 4, "x").endswith(f"Repair or remove {way}")


def test_a_label_that_would_fill_the_memory_is_asked_about():
    rows = datasets.Dataset.from_dict({"label": [0, 10**9]})
    said = r"largest label of data source 'x' is 1000000000. .*set --data.num_classes=1000000001"
    with pytest.raises(linvit.UserError, match=said):
        count_classes({"train": rows}, "label", None, "x")
    assert count_classes({"train": rows}, "label", 10**9 + 1, "x") == 10**9 + 1


@pytest.mark.parametrize(
    ("names", "others", "message"),
    [
        (["ant", "bee"], ["ant", "cow"], "one of them lacks 'bee', 'cow'"),
        (["ant", "bee"], ["bee", "ant"], "they have another order"),
    ],
)
def test_splits_that_call_classes_differently(names, others, message):
    splits = {
        split: datasets.Dataset.from_dict(
            {"label": [0]}, features=datasets.Features({"label": datasets.ClassLabel(names=given)})
        )
        for split, given in (("train", names), ("val", others))
    }
    assert message in error_of(check_same_classes, splits, "label", "x")
    check_same_classes({"train": splits["train"], "val": splits["train"]}, "label", "x")


class TestTrainedClasses:
    """Classes that only some splits have."""

    NAMES = ("cat", "cats", "dog")

    def check(self, names=NAMES, **labels):
        splits = {split: datasets.Dataset.from_dict({"label": given}) for split, given in labels.items()}
        check_trained_classes(splits, "label", list(names), "here")

    @pytest.mark.parametrize("split", ["val", "test"])
    def test_one_without_training_images_is_an_error(self, split):
        labels = {"train": [0, 0, 2], "val": [0, 2], "test": [0, 2], split: [1, 2, 1]}
        assert error_of(lambda: self.check(**labels)) == (
            f"the {split} split of 'here' has classes without training images: 'cats'. Did you mean 'cat'? "
            f"Name them as train does, add training images, or move them elsewhere"
        )

    def test_one_without_validation_images_is_told(self):
        with pytest.warns(UserWarning, match="val split of 'here' has no images of some trained classes: 'cat', 'dog'"):
            self.check(train=[0, 1, 2, 2], val=[1, 1], test=[2])

    def test_numbers_that_begin_at_one_are_told(self):
        with pytest.warns(
            UserWarning, match="least label of 'here' is 1, but labels are counted from 0: .* has 3 outp"
        ):
            self.check("012", train=[1, 2], val=[2, 1], test=[-1])


class TestData:
    """Of the data module."""

    @pytest.mark.parametrize("split", ["train", "val", "test"])
    def test_labels_are_asked_of_the_splits_in_use(self, tmp_path, split):
        labelled = {"train", "val", "test"} - {split}
        folder = image_folder(tmp_path / "data", labelled)
        for number in range(3):
            save(picture(number), folder / split / f"{number}.png")
        for stage, uses in (("fit", {"train", "val"}), ("validate", {"val"}), ("test", {"test"}), ("predict", set())):
            data = ClassificationData(str(folder), num_workers=0, img_size=8)
            assert data.class_names == ["ant", "bee"]
            if split in uses:
                text = error_of(data.setup, stage)
                assert text.startswith(f"the {split} split of data source '{folder}' has no labels")
                assert f"images directly in {split}/ have no class" in text
            else:
                data.setup(stage)

    def test_a_test_split_of_other_columns_harms_only_tests(self, tmp_path):
        rows = datasets.load_dataset("parquet", data_files=str(plain_table(tmp_path / "x.parquet", label=[0, 1] * 5)))
        rows = rows["train"].cast_column("image", datasets.Image())
        for name, test in (("label", rows.remove_columns("label")), ("image", rows.rename_column("image", "scan"))):
            datasets.DatasetDict({"train": rows, "val": rows, "test": test}).save_to_disk(tmp_path / name)
            data = ClassificationData(str(tmp_path / name), num_workers=0, img_size=8)
            data.setup("fit")
            assert data.train_set[0]["label"] == 0
            assert "the test split of data source" in error_of(data.setup, "test")

    def test_a_model_of_other_classes(self, tmp_path):
        folder = image_folder(tmp_path / "data", ["train", "val", "test"])
        data = ClassificationData(str(folder), num_workers=0, img_size=16, batch_size=2)
        task = ClassificationTask(backbone="deit_nano", num_classes=3, img_size=16)
        trainer = Trainer(
            accelerator="cpu", logger=False, max_epochs=1, enable_checkpointing=False, enable_progress_bar=False
        )
        text = error_of(lambda: trainer.fit(task, datamodule=data))
        assert text == (
            f"the model has 3 classes, but data source '{folder}' has 2. "
            f"Build the model with num_classes=2, or choose other data"
        )


class TestStreamed:
    """The data module over a stream."""

    def data(self, path, **options):
        return ClassificationData(str(path), num_workers=0, img_size=8, batch_size=4, streaming=True, **options)

    def test_words_cannot_be_numbered(self, tmp_path):
        path = plain_table(tmp_path / "x.parquet", 10, label=["a", "b"] * 5)
        assert "holds no class indices, which streaming needs" in error_of(lambda: self.data(path).num_classes)

    def test_labels_without_names_need_the_number_of_classes(self, tmp_path):
        path = plain_table(tmp_path / "x.parquet", 10, label=[0, 1] * 5)
        assert "set --data.num_classes" in error_of(lambda: self.data(path).num_classes)
        assert self.data(path, num_classes=2).num_classes == 2

    def test_there_must_be_a_validation_split(self, tmp_path):
        path = plain_table(tmp_path / "x.parquet", 10, label=[0, 1] * 5)
        data = self.data(path, num_classes=2)
        message = error_of(data.setup, "fit")
        assert message.endswith(
            "no val split; it has: train; a stream is not cut in two: add one, or set --data.streaming=false"
        )

    def test_evaluation_sees_all(self):
        data = self.data("digits")
        data.setup("test")
        batches = list(data.test_dataloader())
        assert sorted(row for batch in batches for row in batch["index"].tolist()) == list(range(360))


def test_images_of_a_stream_are_those_of_the_table(tmp_path):
    images = [{"bytes": png(picture(row)), "path": None} for row in range(6)]
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 3}, features=kinds)
    rows.to_parquet(tmp_path / "test.parquet")
    both = [ClassificationData(str(tmp_path), num_workers=0, img_size=8, streaming=stream) for stream in (False, True)]
    for data in both:
        data.setup("test")
    table, stream = (next(iter(data.test_dataloader())) for data in both)
    assert (table["image"] == stream["image"]).all()
    assert (table["label"] == stream["label"]).all()
    assert table["id"] == stream["id"]


def test_folders_called_by_numbers():
    assert places_of(["2", "0"], ["cat", "dog", "owl"], "v2") == [2, 0]
    assert places_of(["2", "10"], ["10", "2", "11"], "digits") == [1, 0]  # the names themselves are numbers
    with pytest.raises(linvit.UserError, match=r"'3'.* The network has 'cat', 'dog', 'owl'"):
        places_of(["2", "3"], ["cat", "dog", "owl"], "v2")
