"""`linvit data check` of images with objects."""

import csv

from linvit.cli.data import main
from tests.data.coco import annotation, annotations, write_coco
from tests.data.images import picture, save


def test_a_good_set(tmp_path, capsys):
    crowd = annotation(1, 30, 1, iscrowd=1)
    write_coco(tmp_path, found=[*annotations(), crowd, annotation(2, 30, bbox=(70, 1, 5, 5))])
    save(picture(1, 50, 50), tmp_path / "val2017" / "9.png")
    assert main(["check", str(tmp_path), "--workers", "0", "--masks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{tmp_path}: 3 classes"
    assert "  train                4 images, 0 of them without objects; 8 objects, 1 of them crowds" in lines
    assert ["1", "18", "dog", "3", "3"] in [line.split() for line in lines]
    assert "  no bad images" in lines
    assert "  WARNING: images in two splits: 3" in lines


def test_everything_bad_is_listed(tmp_path, capsys):
    wrong = [annotation(7, 5, 99), annotation(8, 2) | {"bbox": [1, 2, float("nan"), 4]}]
    write_coco(tmp_path, found=[one for one in [*annotations(), *wrong] if one["category_id"] != 44])
    save(picture(5, 20, 30), tmp_path / "train2017" / "5.png")
    (tmp_path / "val2017" / "9.png").write_bytes(b"no image")
    listed = tmp_path / "bad.csv"
    assert main(["check", str(tmp_path), "--workers", "0", "--output", str(listed)]) == 1
    with listed.open(newline="", encoding="utf-8") as file:
        found = {(split, name.rpartition("/")[2]): reason for split, name, reason in csv.reader(file)}
    assert "not among the classes: 99" in found["train", "5.png"] or "annotations are for" in found["train", "5.png"]
    assert "a field bbox that is not four finite numbers: [1, 2, nan, 4]" in found["train", "2.png"]
    assert "not an image" in found["val", "9.png"]
    out = capsys.readouterr().out
    assert "  WARNING: 1 classes have no training object: 'bottle'" in out
    assert "  train                2 of 6 ANNOTATIONS ARE MALFORMED\n    1 with a field bbox that is not four" in out
    assert "    1 with a category that is not among the classes, such as annotation 7 of" in out
    assert "  2 BAD IMAGES" in out
    assert "its annotations are for 64 x 48 pixels, the image has 20 x 30" in out


def test_masks_that_a_run_with_masks_refuses_are_found(tmp_path, capsys):
    """Label Studio writes empty segmentations for boxes."""
    empty = [annotation(100 + i, 5, segmentation=[]) for i in range(7)]
    write_coco(tmp_path, found=[*annotations(), *empty])
    assert main(["check", str(tmp_path), "--workers", "0"]) == 0
    assert main(["check", str(tmp_path), "--workers", "0", "--masks"]) == 1
    out = capsys.readouterr().out
    assert "7 of 13 ANNOTATIONS ARE MALFORMED\n    7 with an empty segmentation, such as annotation 100 of " in out
    assert "BAD IMAGES" not in out
