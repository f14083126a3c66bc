"""Where images may come from: every source gives its splits under the same names, and says what is wrong with it."""

import datasets
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features

import linvit
from linvit.data.sources import splits
from linvit.data.sources.splits import hold_out, load_splits
from tests.data.images import image_folder, picture, plain_table, png, save

FEATURES = Features({"image": datasets.Image(), "label": ClassLabel(names=["ant", "bee"])})


def table(count=6):
    """A data set of images, prepared by `datasets`."""
    images = [{"bytes": png(picture(seed)), "path": None} for seed in range(count)]
    return Dataset.from_dict({"image": images, "label": [i % 2 for i in range(count)]}, features=FEATURES)


def lengths(source):
    return {name: len(rows) for name, rows in load_splits(str(source)).items()}


@pytest.mark.parametrize("name", ["train", "test tube"])
def test_a_class_may_be_named_like_a_split(tmp_path, name):
    """An image belongs to the split that its outermost folder names, or test images are trained on."""
    folder = image_folder(tmp_path / "data", ["train", "val", "test"], ["ant", name])
    splits = load_splits(str(folder))
    for split, rows in splits.items():
        files = [row["path"] for row in rows.cast_column("image", datasets.Image(decode=False))["image"]]
        assert sorted(files) == sorted(map(str, (folder / split).rglob("*.png")))


def test_a_folder_named_like_the_embedded_set_is_a_path(tmp_path, monkeypatch):
    """A folder of masks would be taken for segmentation, and its images be compared with rows that have no path."""
    monkeypatch.chdir(tmp_path)
    for kind in ("images", "masks"):
        save(picture(0), tmp_path / "digits" / kind / "0.png")
    (tmp_path / "digit_scenes").mkdir()
    with pytest.warns(UserWarning, match=r"not the folder of this name: for that, write '\./digits'"):
        data = linvit.data.ClassificationData("digits")
    data.setup("fit")
    assert (data.num_classes, len(data.train_set)) == (10, 1257)
    with pytest.warns(UserWarning, match=r"write '\./digit_scenes'"):
        linvit.data.SegmentationData()
    with pytest.raises(linvit.UserError, match="it has folders of images and masks"):
        linvit.data.ClassificationData("./digits").setup("fit")


def test_a_file_may_be_named_like_a_split(tmp_path):
    for name in ("ant", "bee"):
        save(picture(0), tmp_path / "data" / name / "test_0.png")
        save(picture(1), tmp_path / "data" / name / "other.png")
    assert lengths(tmp_path / "data") == {"train": 4}


def test_a_new_image_is_seen(tmp_path):
    folder = image_folder(tmp_path / "data", ["train"])
    assert lengths(folder) == {"train": 6}
    save(picture(99), folder / "train" / "ant" / "new.png")
    assert lengths(folder) == {"train": 7}


METADATA = {
    "metadata.csv": "file_name,label\ntest_1.png,bee\n0.png,ant\n",
    "metadata.jsonl": '{"file_name": "test_1.png", "label": "bee"}\n{"file_name": "0.png", "label": "ant"}\n',
}


@pytest.mark.parametrize("name", METADATA)
def test_labels_may_stand_in_a_file_beside_the_images(tmp_path, name):
    for path in ("train/0.png", "train/test_1.png", "test/2.png"):
        save(picture(0), tmp_path / path)
    (tmp_path / "train" / name).write_text(METADATA[name])
    (tmp_path / "test" / "metadata.csv").write_text("id,patient\n7,12\n")  # of something else
    found = load_splits(str(tmp_path))
    assert {split: len(rows) for split, rows in found.items()} == {"train": 2, "test": 1}
    rows = found["train"].cast_column("image", datasets.Image(decode=False))
    assert {row["image"]["path"].rpartition("/")[2]: row["label"] for row in rows} == {
        "test_1.png": "bee",
        "0.png": "ant",
    }
    save(picture(1), tmp_path / "train/1.png")
    with pytest.warns(UserWarning, match=r"1 of 3 images in '.*train' are left out: its metadata lacks them"):
        assert lengths(tmp_path) == {"train": 2, "test": 1}


@pytest.mark.parametrize("name", ["data.parquet", "data.arrow"])
def test_one_file(tmp_path, name):
    path = tmp_path / name
    if path.suffix == ".parquet":
        table().to_parquet(path)
    else:
        with datasets.arrow_writer.ArrowWriter(path=str(path), features=FEATURES) as writer:
            for row in table().cast_column("image", datasets.Image(decode=False)):
                writer.write(row)
            writer.finalize()
    rows = load_splits(str(path))
    assert {name: len(part) for name, part in rows.items()} == {"train": 6}
    assert rows["train"].features == FEATURES


def test_a_folder_of_parquet_files(tmp_path):
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    for name, count in (("train-00000-of-00002", 4), ("train-00001-of-00002", 3), ("test-00000-of-00001", 2)):
        table(count).to_parquet(folder / "data" / f"{name}.parquet")
    assert lengths(folder) == {"train": 7, "test": 2}


def test_what_save_to_disk_wrote(tmp_path):
    DatasetDict({"train": table(4), "validation": table(2)}).save_to_disk(tmp_path / "splits")
    table(5).save_to_disk(tmp_path / "single")
    assert lengths(tmp_path / "splits") == {"train": 4, "val": 2}
    assert lengths(tmp_path / "single") == {"train": 5}


def test_the_home_folder_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    image_folder(tmp_path / "data", ["train"])
    assert lengths("~/data") == {"train": 6}


def test_the_hub_is_asked_through_datasets(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return DatasetDict({"train": table(4), "validation": table(2), "extra": table(1)})

    monkeypatch.setattr(splits.datasets, "load_dataset", load_dataset)
    with pytest.warns(
        UserWarning, match="left out of 'hub:owner/name': the splits 'extra'; train, validation are taken"
    ):
        assert lengths("hub:owner/name") == {"train": 4, "val": 2}
    assert asked == [(("owner/name",), {})]


def test_a_path_beats_the_hub_only_where_it_is_said(tmp_path, monkeypatch):
    """`owner/name` without `hub:` is a path, and nothing is ever fetched for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(splits.datasets, "load_dataset", lambda *args, **kwargs: pytest.fail("asked the hub"))
    with pytest.raises(linvit.UserError, match="there is no data at 'owner/name'"):
        load_splits("owner/name")


def test_brackets_in_a_path_are_no_pattern(tmp_path):
    folder = tmp_path / "set[1]"
    plain_table(folder / "tables" / "x.parquet", 4, label=[0, 1, 0, 1])
    assert lengths(folder / "tables") == lengths(folder / "tables" / "x.parquet") == {"train": 4}


class TestMistakes:
    """Each one is a user error that names the source and the way out."""

    def message(self, source):
        with pytest.raises(linvit.UserError) as error:
            load_splits(str(source))
        return str(error.value)

    def test_an_empty_folder(self, tmp_path):
        (tmp_path / "data" / "train" / "ant").mkdir(parents=True)
        (tmp_path / "data" / ".DS_Store").touch()
        assert self.message(tmp_path / "data").startswith(f"there are no images in '{tmp_path / 'data'}'")

    @pytest.mark.parametrize("file", ["notes.txt", "train/labels.csv"])
    def test_a_folder_without_images(self, tmp_path, file):
        path = tmp_path / "data" / file
        path.parent.mkdir(parents=True)
        path.write_text("a,b\n1,2\n")
        text = self.message(tmp_path / "data")
        assert f"there are no images in '{tmp_path / 'data'}'" in text
        assert "one folder of images per class" in text

    @pytest.mark.parametrize("name", ["picture.png", "data.csv"])
    def test_a_file_of_another_kind(self, tmp_path, name):
        (tmp_path / name).write_bytes(b"x")
        text = self.message(tmp_path / name)
        assert text.startswith(f"cannot read '{tmp_path / name}' as data")
        assert ".parquet" in text

    @pytest.mark.parametrize("name", ["", "../set"])
    def test_names_that_the_hub_cannot_know(self, name, monkeypatch):
        monkeypatch.setattr(splits.datasets, "load_dataset", lambda name: pytest.fail("asked the hub"))
        assert self.message(f"hub:{name}") == f"a set on the hub is called hub:owner/name; got 'hub:{name}'"

    @pytest.mark.parametrize("error", [ConnectionError, RuntimeError])
    def test_what_the_hub_does_not_give(self, monkeypatch, error):
        def load_dataset(name):
            raise error("not now")

        monkeypatch.setattr(splits.datasets, "load_dataset", load_dataset)
        assert self.message("hub:owner/name").startswith("cannot get 'hub:owner/name': not now. Is the name right")

    def test_a_link_of_a_split_that_leads_nowhere(self, tmp_path):
        folder = image_folder(tmp_path / "data", ["train"])
        (folder / "val").symlink_to("nowhere")
        assert f"cannot read the folder '{folder}/val'" in self.message(folder)

    def test_splits_of_unknown_names(self, monkeypatch):
        monkeypatch.setattr(splits.datasets, "load_dataset", lambda name: {"left": table(1), "right": table(1)})
        text = self.message("hub:owner/name")
        assert text == "data source 'hub:owner/name' has the splits left, right; expected at least 'train'"


def test_a_table_of_another_program(tmp_path):
    assert lengths(plain_table(tmp_path / "data.parquet", 4, label=[0, 1, 0, 1])) == {"train": 4}


class TestHoldingOut:
    """Data without a validation split."""

    def test_the_parts_are_the_whole_and_always_the_same(self):
        parts = hold_out(10, 0.25, "x")
        assert {name: len(rows) for name, rows in parts.items()} == {"train": 7, "val": 3}
        assert sorted([*parts["train"], *parts["val"]]) == list(range(10))
        assert all((parts[name] == rows).all() for name, rows in hold_out(10, 0.25, "x").items())

    @pytest.mark.parametrize(("count", "share"), [(0, 0.1), (1, 0.1), (3, 0.9)])
    def test_something_must_be_left_to_train_on(self, count, share):
        with pytest.raises(linvit.UserError, match=f"a fraction of {share} of its {count} training .* leave none"):
            hold_out(count, share, "x")
