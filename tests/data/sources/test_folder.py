"""Folders of images: the same as `datasets` finds."""

import os
from pathlib import PureWindowsPath

import datasets
import pytest

import linvit
from linvit.data.sources import folder
from linvit.data.sources.folder import image_folder


def fill(root, files):
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


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
    "one class": ["train/ant/0.jpg", "train/ant/1.jpg"],
    "flat": ["train/0.jpg", "train/1.jpg"],
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


def test_a_name_that_is_not_utf_8_is_told(tmp_path):
    fill(tmp_path, CLASSES)
    os.close(os.open(os.fsencode(tmp_path / "train" / "ant") + b"/\xff.jpg", os.O_CREAT))
    with pytest.raises(linvit.UserError, match=r"the name of the file '.*/train/ant/\\udcff.jpg' is not UTF-8"):
        image_folder(tmp_path, {"train": tmp_path / "train"})


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    fill(tmp_path, CLASSES)
    scandir = os.scandir

    def denied(path):
        if str(path).endswith("bee"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(folder.os, "scandir", denied)
    with pytest.raises(linvit.UserError, match=r"cannot read the folder '.*/train/bee': Permission denied"):
        image_folder(tmp_path, {"train": tmp_path / "train"})


def test_backslashes_of_windows_hide_no_classes(monkeypatch):
    """Every image was a class of its own there: the folder in its path was looked for between slashes."""

    class WindowsPath(PureWindowsPath):
        def absolute(self):
            return self

    tree = {
        r"C:\photos\train": ([*"ab"], []),
        **{rf"C:\photos\train\{name}": ([], ["1.png", "2.png"]) for name in "ab"},
    }
    monkeypatch.setattr(folder, "Path", WindowsPath)
    monkeypatch.setattr(folder, "_tell_left_out", lambda *_: None)
    monkeypatch.setattr(folder.os, "walk", lambda *_, **__: ((path, *inside) for path, inside in tree.items()))
    tables = image_folder(WindowsPath(r"C:\photos"), {"train": WindowsPath(r"C:\photos\train")})
    rows = tables["train"].cast_column("image", datasets.Image(decode=False))
    assert rows.features["label"].names == ["a", "b"]
    assert rows["label"][:] == [0, 0, 1, 1]
    assert rows[0]["image"]["path"] == "C:/photos/train/a/1.png"
