"""Which folders are classes, and what may be wrong with them."""

import pytest

from linvit.data.sources.folder import image_folder


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
        ([*SPLITS, "test/day/ant/0.jpg"], ["ant", "bee"], {"train", "val", "test"}),
        (["train/0.jpg", "val/0.jpg"], [], set()),
        (["train/ant/0.jpg", "val/ant/0.jpg"], [], set()),
        (["train/0.jpg", "val/ant/0.jpg", "val/bee/0.jpg"], ["ant", "bee"], {"val"}),
    ],
    ids=lambda value: str(sorted(value)),  # the order of a set differs between the processes of a run
)
def test_classes_are_the_folders_below_a_split(tmp_path, files, names, splits):
    assert found(tmp_path, files) == (names, splits)


def test_different_depths_in_a_split(tmp_path):
    with pytest.warns(UserWarning, match=r"the val images of .* depths, such as in .*/val' and in .*/val/ant'"):
        assert found(tmp_path, [*SPLITS, "val/0.jpg"]) == (["ant", "bee"], {"train"})
