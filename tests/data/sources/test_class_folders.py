"""Which folders are classes, as torchvision has them, and what may be wrong with them."""

import warnings

import datasets
import pytest
from torchvision.datasets import ImageFolder

import linvit
from linvit.data import ClassificationData
from linvit.data.sources.folder import image_folder
from linvit.data.sources.splits import load_splits
from tests.data.images import picture, save


def found(root, files, folders=(), links=()):
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for folder in folders:
        (root / folder).mkdir(parents=True)
    for link in links:
        (root / link).symlink_to("nowhere")
    tables = image_folder(root, {split.name: split for split in sorted(root.iterdir())})
    labelled = {split: rows.features["label"].names for split, rows in tables.items() if "label" in rows.features}
    return next(iter(labelled.values()), []), {*labelled}


SPLITS = ["train/ant/0.jpg", "train/bee/0.jpg", "val/ant/1.jpg"]


@pytest.mark.parametrize(
    ("files", "names", "splits"),
    [
        (SPLITS, ["ant", "bee"], {"train", "val"}),
        ([*SPLITS, "val/cats/2.jpg"], ["ant", "bee", "cats"], {"train", "val"}),
        ([*SPLITS, "test/0.jpg"], ["ant", "bee"], {"train", "val"}),
        ([*SPLITS, "test/ant/day/0.jpg"], ["ant", "bee"], {"train", "val", "test"}),
        (["train/0.jpg", "val/0.jpg"], [], set()),
        (["train/ant/0.jpg", "val/ant/0.jpg"], [], set()),
        (["train/0.jpg", "val/ant/0.jpg", "val/bee/0.jpg"], ["ant", "bee"], {"val"}),
    ],
    ids=lambda value: str(sorted(value)),  # the order of a set differs between the processes of a run
)
def test_classes_are_the_folders_below_a_split(tmp_path, files, names, splits):
    assert found(tmp_path, files) == (names, splits)


def test_images_beside_the_classes_are_left_out(tmp_path):
    with pytest.warns(
        UserWarning, match=r"left out of '.*/val': 1 images beside the class folders, such as '.*/0.jpg'"
    ):
        assert found(tmp_path, [*SPLITS, "val/0.jpg"]) == (["ant", "bee"], {"train", "val"})


def test_one_class_is_none_and_named(tmp_path):
    told = (
        r"only class folder is '.*/train/all'; if its folders 'ant', 'bee' are the classes, move them into '.*/train'"
    )
    with pytest.warns(UserWarning, match=told):
        assert found(tmp_path, ["train/all/ant/0.jpg", "train/all/bee/0.jpg"]) == ([], set())


def test_what_else_is_left_out_is_named(tmp_path):
    more = ["train/__other__/0.jpg", "train/.ipynb_checkpoints/0.jpg", "train/ant/0.heic", "train/metadata.csv"]
    with pytest.warns(UserWarning, match="files of kinds") as told:
        assert found(tmp_path, [*SPLITS, *more])[0] == ["ant", "bee"]
    (text,) = [str(one.message) for one in told if "kinds" in str(one.message)]
    assert text.endswith(
        f"1 files of kinds that are not read, such as '{tmp_path}/train/ant/0.heic'; the hidden folders '__other__'"
    )


def images(root, files):
    for number, file in enumerate(files):
        save(picture(number), root / file)


def listed(root, **options):
    """Paths below the root, and their classes, of each split."""
    found = {}
    for split, rows in load_splits(str(root), **options).items():
        names = getattr(rows.features.get("label"), "names", None)
        labels = [names[label] for label in rows["label"]] if names else [None] * len(rows)
        paths = [row["path"] for row in rows.cast_column("image", datasets.Image(decode=False))["image"]]
        found[split] = dict(zip([path.removeprefix(f"{root}/") for path in paths], labels, strict=True))
    return found


TREES = {
    "day and night": ["cat/day", "cat/night", "dog/day"],
    "one folder in each": ["cat/photos", "dog/photos"],
    "different depths": ["cat", "cat/more/and/more", "dog"],
    "folders called like splits": ["test", "train", "other"],
}


@pytest.mark.parametrize("folders", TREES.values(), ids=TREES)
@pytest.mark.parametrize("split", ["train", ""])
def test_classes_are_those_of_torchvision(tmp_path, folders, split):
    images(tmp_path, [f"{split or '.'}/{folder}/{number}.png" for folder in folders for number in range(2)])
    right = ImageFolder(str(tmp_path / split))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (own,) = listed(tmp_path).values()
    assert own == {path.removeprefix(f"{tmp_path}/"): right.classes[label] for path, label in right.samples}


class TestSplits:
    """Folders that are called like splits."""

    @pytest.mark.parametrize("names", [("bus", "car", "train"), ("dev", "prod")])
    def test_they_are_classes_beside_others_with_images(self, tmp_path, names):
        images(tmp_path, [f"{name}/{number}.png" for name in names for number in range(2)])
        with pytest.warns(UserWarning, match=r"in '.*' are classes, like '.*' beside them, not splits"):
            assert {*listed(tmp_path)["train"].values()} == {*names}

    def test_they_are_splits_if_they_have_classes_and_what_lies_beside_them_is_named(self, tmp_path):
        images(tmp_path, ["train/a/0.png", "train/b/0.png", "val/a/1.png", "dev/a/2.png", "more/0.png", "3.png"])
        told = "left out of '.*': 'dev', 'more', 1 images, such as '3.png', beside its splits, which are 'train', 'val'"
        with pytest.warns(UserWarning, match=told):
            assert listed(tmp_path) == {
                "train": {"train/a/0.png": "a", "train/b/0.png": "b"},
                "val": {"val/a/1.png": "a"},
            }

    @pytest.mark.parametrize(("train", "val"), [("TRAIN", "VALID"), ("training", "Dev")])
    def test_case_does_not_matter(self, tmp_path, train, val):
        images(tmp_path, [f"{split}/{name}/{split}.png" for split in (train, val) for name in "ab"])
        assert {split: len(own) for split, own in listed(tmp_path).items()} == {"train": 2, "val": 2}

    @pytest.mark.parametrize(
        "names",
        [
            *[("training_set", "test_set"), ("train2017", "val2017"), ("My-Train", "My-Valid")],
            ("seg_train", "seg_test", "seg_pred"),
        ],
    )
    def test_names_that_are_like_those_of_splits(self, tmp_path, names):
        """All images were of train, those of the test set too."""
        images(tmp_path, [f"{name}/{label}/{name}{label}.png" for name in names for label in "ab"])
        with pytest.raises(linvit.UserError, match="look like splits; rename them to train, val and test"):
            load_splits(str(tmp_path))

    @pytest.mark.parametrize(
        "names",
        [
            ("test_a", "test_b"),
            ("trainer", "tester"),
            ("bullet train", "test tube", "dog"),
        ],
    )
    def test_names_that_are_not(self, tmp_path, names):
        images(tmp_path, [f"{name}/0.png" for name in names])
        assert {*listed(tmp_path)["train"].values()} == {*names}

    def test_one_level_too_high(self, tmp_path):
        images(tmp_path, ["set/train/a/0.png", "set/train/b/0.png", "set/val/a/1.png"])
        with pytest.raises(
            linvit.UserError, match=f"splits of .*, 'train', 'val', are one level below; give '{tmp_path}/set'"
        ):
            load_splits(str(tmp_path))

    def test_below_the_classes(self, tmp_path):
        images(
            tmp_path, [f"{name}/{split}/{name}{split}.png" for name in ("cat", "dog") for split in ("train", "test")]
        )
        with pytest.warns(UserWarning, match="all images below are of train, including .*/cat/test'"):
            assert {*listed(tmp_path)["train"].values()} == {"cat", "dog"}

    def test_all_images_are_predicted(self, tmp_path):
        """No class folder leaves any out."""
        images(tmp_path / "a", ["0.png", "day/1.png", "night/2.png", "night/more/3.png"])
        images(tmp_path / "b", ["bus/0.png", "train/1.png"])
        assert len(listed(tmp_path / "a", classes=False)["train"]) == 4
        assert len(listed(tmp_path / "b", classes=False)["train"]) == 2
        data = ClassificationData(predict_path=str(tmp_path / "a"), num_workers=0, img_size=8)
        data.setup("predict")
        assert len(data.predict_set) == 4


def test_parquet_files_that_are_not_read_are_named(tmp_path):
    for name in ("bus", "train"):
        datasets.Dataset.from_dict({"image": ["x.png"], "label": [name]}).to_parquet(tmp_path / f"{name}.parquet")
    with pytest.warns(UserWarning, match=f"left out of '{tmp_path}': '{tmp_path}/bus.parquet'"):
        assert load_splits(str(tmp_path))["train"]["label"][:] == ["train"]


@pytest.mark.parametrize(("name", "told"), [("x/train.zip", "Unpack 'train.zip'"), ("x.zip", "Unpack it")])
def test_archives_are_to_be_unpacked(tmp_path, name, told):
    (tmp_path / "x").mkdir()
    (tmp_path / name).write_bytes(b"PK")
    with pytest.raises(linvit.UserError, match=told):
        load_splits(str(tmp_path / name.partition("/")[0]))
