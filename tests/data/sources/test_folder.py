"""Folders of images: the same as `datasets` finds, and found again without looking at every file."""

import os
import time
from itertools import chain

import datasets
import pytest

import linvit
from linvit.data.sources import folder
from linvit.data.sources.folder import image_folder
from tests.data.images import picture, save


def fill(root, files):
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def settle(root):
    """Makes every folder look as if nothing had been changed for an hour."""
    then = time.time() - 3600
    for place, _, _ in os.walk(root, followlinks=True):
        os.utime(place, (then, then))


def listed(tables):
    """Rows and columns, undecoded."""
    return {
        name: (rows.cast_column("image", datasets.Image(decode=False))[:], rows.features)
        for name, rows in tables.items()
    }


CLASSES = ["train/ant/1.jpg", "train/ant/0.JPEG", "train/bee/a b.png", "val/bee/0.jpg"]
TREES = {
    "splits": CLASSES,
    "order": ["train/a/x.jpg", "train/a b/x.jpg", "train/a-b/x.jpg", "train/a/x-y.jpg", "train/B/x.jpg", "val/a/1.jpg"],
    "hidden": [*CLASSES, "train/.hidden/x.jpg", "train/ant/.x.jpg", "train/__pycache__/x.jpg", "train/ant/__x.jpg"],
    "others": [*CLASSES, "train/ant/notes.txt", "train/bee/no_extension"],
    "folders like files": [*CLASSES, "train/x.jpg/1.png"],
    "nested": ["train/red/ant/0.jpg", "train/red/bee/0.jpg", "train/blue/ant/1.jpg", "val/red/bee/2.jpg"],
    "one class": ["train/ant/0.jpg", "train/ant/1.jpg"],
    "flat": ["train/0.jpg", "train/1.jpg"],
    "different depths": ["train/ant/0.jpg", "train/bee/0.jpg", "train/0.jpg"],
    "an empty split": CLASSES[:3],
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_it_finds_what_datasets_finds(tmp_path, tree):
    root = tmp_path / "set"
    fill(root, tree)
    splits = {name: root / name for name in ("train", "val") if (root / name).exists()}
    files = {name: [f"{place}/**"] for name, place in splits.items()}
    expected = dict(datasets.load_dataset("imagefolder", data_files=files))
    assert listed(image_folder(root, splits)) == listed(expected)
    settle(root)
    for _ in range(2):  # once written to the cache, once read from it
        assert listed(image_folder(root, splits)) == listed(expected)


class TestCache:
    """The second start."""

    @pytest.fixture
    def root(self, tmp_path, monkeypatch):
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        root = tmp_path / "set"
        fill(root, CLASSES)
        settle(root)
        return root

    def found(self, root):
        tables = image_folder(root, {name: root / name for name in ("train", "val")})
        return {name: [image["path"] for image in rows["image"]] for name, (rows, _) in listed(tables).items()}

    def test_lists_no_folder_again(self, root, monkeypatch):
        first = self.found(root)
        monkeypatch.setattr(folder, "_walk", lambda root: pytest.fail("looked at every file"))
        assert self.found(root) == first

    def test_is_memory_mapped(self, root):
        tables = image_folder(root, {"train": root / "train"})
        assert tables["train"].cache_files

    @pytest.mark.parametrize(
        "change",
        [
            lambda root: (root / "train" / "ant" / "new.jpg").touch(),
            lambda root: (root / "train" / "ant" / "1.jpg").unlink(),
            lambda root: (root / "val" / "bee" / "0.jpg").rename(root / "val" / "bee" / "9.jpg"),
            lambda root: fill(root, ["val/cow/0.jpg"]),
            lambda root: (root / "train" / "bee").rename(root / "train" / "wasp"),
        ],
        ids=["added", "removed", "renamed", "a class", "a class renamed"],
    )
    def test_a_change_is_seen(self, root, change):
        first = self.found(root)
        change(root)
        second = self.found(root)
        assert second != first
        assert sorted(chain.from_iterable(second.values())) == sorted(
            str(path) for path in root.rglob("*") if path.is_file()
        )
        settle(root)
        assert self.found(root) == second
        assert len(list(root.parent.glob("cache/linvit/folders/*/*.arrow"))) == 2  # what is out of date goes

    def test_a_folder_that_may_still_be_changing_is_not_trusted(self, root):
        (root / "train" / "ant" / "new.jpg").touch()
        self.found(root)
        assert not list(root.parent.glob("cache/linvit/folders/*/index.json"))

    @pytest.mark.parametrize("name", ["index.json", "*.arrow"])
    def test_a_damaged_cache_is_made_anew(self, root, name):
        first = self.found(root)
        for file in root.parent.glob(f"cache/linvit/folders/*/{name}"):
            file.unlink() if name == "*.arrow" else file.write_text("{")
        assert self.found(root) == first

    def test_a_cache_that_cannot_be_written_costs_only_time(self, root):
        (root.parent / "cache").write_text("a file, no folder")
        assert len(self.found(root)["train"]) == 3


def test_notes_beside_an_image_are_no_image(tmp_path):
    """`datasets` takes 0.jpg.txt for one."""
    fill(tmp_path, [*CLASSES, "train/ant/0.jpg.txt"])
    assert len(image_folder(tmp_path, {"train": tmp_path / "train"})["train"]) == 3


def test_links_are_followed_but_not_round_in_circles(tmp_path):
    fill(tmp_path, ["elsewhere/0.jpg", "set/train/bee/0.jpg"])
    (tmp_path / "set" / "train" / "ant").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "set" / "train" / "bee" / "up").symlink_to(tmp_path / "set")
    rows = image_folder(tmp_path / "set", {"train": tmp_path / "set" / "train"})["train"]
    assert rows.features["label"].names == ["ant", "bee"]
    assert len(rows) == 2


@pytest.mark.parametrize("more", [["test/0.jpg", "test/1.jpg"], ["test/ant/0.jpg", "test/1.jpg"]], ids=str)
def test_a_split_without_classes_takes_none_from_the_others(tmp_path, more):
    fill(tmp_path, [*CLASSES, *more])
    tables = image_folder(tmp_path, {name: tmp_path / name for name in ("train", "val", "test")})
    assert tables["train"].features["label"].names == ["ant", "bee"]
    assert [rows["label"][:] for rows in (tables["train"], tables["val"])] == [[0, 0, 1], [1]]
    assert list(tables["test"].features) == ["image"]


def test_what_may_be_wrong_is_said_at_each_start(tmp_path):
    fill(tmp_path, CLASSES)
    (tmp_path / "train" / "cow").mkdir()
    settle(tmp_path)
    for _ in range(3):
        with pytest.warns(UserWarning, match="no images lie in '.*/train/cow'"):
            image_folder(tmp_path, {"train": tmp_path / "train"})


def test_a_name_that_is_not_utf_8_is_told(tmp_path):
    fill(tmp_path, CLASSES)
    os.close(os.open(os.fsencode(tmp_path / "train" / "ant") + b"/\xff.jpg", os.O_CREAT))
    with pytest.raises(linvit.UserError, match=r"the name of the file '.*/train/ant/\\udcff.jpg' is not UTF-8"):
        image_folder(tmp_path, {"train": tmp_path / "train"})


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    fill(tmp_path, CLASSES)
    scandir = os.scandir

    def denied(path):
        if path.endswith("bee"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(folder.os, "scandir", denied)
    with pytest.raises(linvit.UserError, match=r"cannot read the folder '.*/train/bee': Permission denied"):
        image_folder(tmp_path, {"train": tmp_path / "train"})


@pytest.mark.parametrize("other", ["metadata.csv", "images.zip"])
def test_what_only_datasets_can_read_is_left_to_it(tmp_path, other):
    fill(tmp_path, [*CLASSES, f"train/{other}"])
    assert image_folder(tmp_path, {"train": tmp_path / "train"}) is None


def test_metadata_is_still_read(tmp_path):
    for name in ("0.png", "1.png"):
        save(picture(0), tmp_path / "train" / name)
    (tmp_path / "train" / "metadata.csv").write_text("file_name,label\n0.png,4\n1.png,2\n")
    assert linvit.data.sources.splits.load_splits(str(tmp_path))["train"]["label"][:] == [4, 2]
