"""Sets on the disk: which classes are right for each image, and what is refused."""

import json
import re

import numpy as np
import pytest
from PIL import Image

from linvit.data import ClassificationData
from linvit.errors import UserError
from linvit.evaluation.sets import read_set, real_labels
from tests.data.images import image_folder, picture, save

CLASSES = ["n01", "n02", "n03", "n04"]


def data(source):
    return ClassificationData(str(source), num_workers=0, img_size=[10, 12], crop_pct=1.0)


def written(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_folders_called_by_some_of_the_classes(tmp_path):
    found = read_set("a", data(image_folder(tmp_path / "a", [""], ["n04", "n02"], 2)), CLASSES)
    assert found.classes == [1, 3]
    assert found.answers == [[1], [1], [3], [3]]  # all of a folder that has no splits
    assert len(found.images(data("digits").eval_transform)) == 4


def test_folders_called_by_numbers(tmp_path):
    found = read_set(
        "v2", data(image_folder(tmp_path / "v2", [""], [str(number) for number in range(12)], 1)), "abcdefghijkl"
    )
    assert found.answers == [[0], [1], [10], [11], *([number] for number in range(2, 10))]


def test_folders_mapped_by_a_file(tmp_path):
    image_folder(tmp_path / "objects", [""], ["chair", "cup", "plug"], 2)
    mapping = written(tmp_path / "map.json", {"chair": ["n03", "n01"], "plug": 1})
    for folder in (tmp_path / "objects").iterdir():
        for path in folder.iterdir():
            framed = Image.new("RGB", (16, 14), "red")
            framed.paste(Image.open(path), (2, 2))
            framed.save(path)
    found = read_set("objectnet", data(tmp_path / "objects"), CLASSES, mapping)
    assert found.answers == [[2, 0], [2, 0], [1], [1]]
    assert found.classes == [0, 1, 2]
    first = found.images(data("digits").eval_transform)[0]["image"]  # without the frame
    assert np.array_equal(first.permute(1, 2, 0), np.asarray(picture(0)))


def test_real_labels_are_in_the_order_of_file_names(tmp_path):
    for number, name in ((1, "n02"), (2, "n01"), (3, "n02")):
        save(picture(number), tmp_path / "val" / name / f"ILSVRC2012_val_0000000{number}.JPEG")
    clean = read_set("clean", data(tmp_path / "val"), CLASSES)
    assert clean.answers == [[0], [1], [1]]  # numbers 2, 1, 3
    real = written(tmp_path / "real.json", [[1, 3], [], [2]])
    assert real_labels(real, clean, 4) == [[], [1, 3], [2]]
    with pytest.raises(UserError, match=r"has labels of 2 images, but the clean set has 3"):
        real_labels(written(tmp_path / "short.json", [[1], [2]]), clean, 4)
    with pytest.raises(UserError, match=r"a list for each image, of numbers from 0 to 3"):
        real_labels(written(tmp_path / "wrong.json", [[1], [2], [4]]), clean, 4)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (None, "2 of the 2 classes of 'FOLDER' are not among those of the network: 'ant', 'bee'"),
        ({"cat": 1}, "contains no class of 'FOLDER', such as 'ant'"),
        ({"ant": "n09"}, "1 of the 1 classes of 'MAP' are not among those of the network: 'n09'. Did you mean 'n04'?"),
        ([1], "'MAP' must hold a JSON object"),
    ],
)
def test_what_is_refused(mapping, message, tmp_path):
    folder, path = image_folder(tmp_path / "x", [""]), tmp_path / "map.json"
    if mapping is not None:
        written(path, mapping)
    wanted = message.replace("FOLDER", str(folder)).replace("MAP", str(path))
    with pytest.raises(UserError, match=re.escape(wanted).replace("n04", r"n0\d")):
        read_set("a", data(folder), CLASSES, None if mapping is None else path)
