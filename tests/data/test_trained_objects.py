"""What is said to be trained on is what training samples hold; what is left out is named, with reasons."""

import json
import warnings

import pytest

from linvit import UserError
from linvit.cli.data import main
from linvit.data import DetectionData
from tests.data.coco import SIZES, annotation, write_coco, write_json
from tests.data.images import picture, save
from tests.training import trainer

BOXES = [(3, 4, 20, 10), (10, 8, 30, 20), (5, 5, 12, 12), (1, 2, 9, 9)]


def objects(change):
    """Four objects in each of the four images, each fourth of which is changed."""
    found = [annotation(4 * image + i, image, 1, box) for image in SIZES for i, box in enumerate(BOXES)]
    for one in found[::4]:
        change(one)
    return found


def turned(one):
    x, y, w, h = one["bbox"]
    one["bbox"] = [x + w, y + h, -w, -h]


def in_fractions(one):
    one["segmentation"] = [[value / 64 for value in one["segmentation"][0]]]


CHANGES = {
    "a box of negative width or height": turned,
    "a box with a side of less than a pixel": lambda one: one.update(bbox=[5, 5, 0, 9]),
    "a box outside of its image": lambda one: one.update(bbox=[100, 4, 9, 9]),
    "an area of 0 or less": lambda one: one.update(area=0),
    "iscrowd: 1": lambda one: one.update(iscrowd=1),
    "ignore: 1": lambda one: one.update(ignore=1),
    "an empty mask": lambda one: one.update(segmentation=[[1, 2, 9, 9]]),
    "an empty mask (polygons": in_fractions,
}


def coco(folder, **options):
    return DetectionData(str(folder), **{"batch_size": 2, "num_workers": 0, "resize_limits": None, **options})


def trained(data):
    """Objects of each class in all training samples."""
    labels = [label for i in range(len(data.train_set)) for label in data.train_set[i]["labels"].tolist()]
    return [labels.count(label) for label in range(data.num_classes)]


def scored(data):
    """Objects of each class, without crowds, in all validation samples."""
    samples = [data.val_set[i] for i in range(len(data.val_set))]
    labels = [label for one in samples for label in one["labels"][~one["iscrowd"]].tolist()]
    return [labels.count(label) for label in range(data.num_classes)]


@pytest.mark.parametrize(
    ("reason", "splits"), [*((reason, ("train", "val")) for reason in CHANGES), ("iscrowd: 1", ("train",))]
)
def test_the_table_counts_what_is_trained_on(tmp_path, reason, splits, capsys):
    masks = "mask" in reason
    write_coco(tmp_path, splits, objects(CHANGES[reason]))
    data = coco(tmp_path, masks=masks, val_fraction=0.25)
    left_out = "4 of 16" if "val" in splits else "3 of 12"  # of the images that are not held out
    with pytest.warns(UserWarning, match=f"leaves out {left_out} objects .*{reason}".replace("(", r"\(")):
        data.setup("fit")
    counts = data.data_source.counts("train").tolist()
    assert counts == trained(data) == [12 if "val" in splits else 9, 0, 0]
    assert data.data_source.counts("val").tolist() == scored(data)
    if splits == ("train",):
        return
    main(["check", str(tmp_path), "--workers=0", *["--masks"] * masks, "--data=DetectionData"])
    said = capsys.readouterr().out
    assert said.count(f"leaves out 4 of 16 objects (25.0%): 4 with {reason}") == 1
    assert said.count("WARNING: 2 classes have no training object: 'dog', 'bottle'") == 1
    assert f"    0      1  person{counts[0]:>10}" in said


@pytest.mark.parametrize("small", [*SIZES][:2])
def test_objects_of_small_images_are_scored_and_not_trained(tmp_path, small):
    write_coco(tmp_path, ("train",), objects(lambda one: None), sizes={**SIZES, small: (20, 64)})
    data = coco(tmp_path, val_fraction=0.25)
    data.setup("fit")
    held_out = len(data.train_set) == 3  # the small image
    assert data.data_source.counts("train").tolist() == trained(data) == [12 if held_out else 8, 0, 0]
    assert data.data_source.counts("val").tolist() == scored(data) == [4, 0, 0]


def test_the_fraction_left_out_is_of_the_classes_that_are_used(tmp_path):
    many = [annotation(key, image, 1, BOXES[key % 4]) for image in SIZES for key in range(30 * image, 30 * image + 30)]
    few = [annotation(2000 + key, 5, 18, BOXES[key], area=key % 2) for key in range(4)]
    write_coco(tmp_path, found=many + few)
    with pytest.warns(UserWarning, match=r"leaves out 2 of 4 objects \(50.0%\)"):
        coco(tmp_path, class_names=["dog"]).setup("fit")


def test_splits_without_an_object_to_score_are_named(tmp_path):
    write_coco(tmp_path)
    write_coco(tmp_path, ("val",), [annotation(key, 5, 1, BOXES[key], iscrowd=1) for key in range(4)])
    with pytest.warns(UserWarning, match="all objects of the validation split of .* are crowds"):
        coco(tmp_path).setup("fit")
    with pytest.raises(UserError, match=r"the val split .* has no objects.*of classes that --data.class_names leaves"):
        coco(tmp_path, class_names=["dog"]).setup("fit")


def test_few_objects_that_are_left_out_are_no_warning(tmp_path):
    many = [annotation(key, 5, 1, BOXES[key % 4]) for key in range(21)]
    many[3]["iscrowd"] = 1
    write_coco(tmp_path, found=many)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        coco(tmp_path).setup("fit")
    assert not [one for one in caught if "leaves out" in str(one.message)]


def test_a_run_without_any_object_is_refused(tmp_path, capsys):
    found = objects(lambda one: None)
    for one in found:
        one.update(area=0)
    write_coco(tmp_path, ("train",), found)
    write_coco(tmp_path, ("val",))
    data = coco(tmp_path)
    data.trainer = trainer(tmp_path, logger=False)
    data.trainer.strategy._lightning_module = type("Module", (), {"hparams": {}})()
    with pytest.raises(UserError, match="can be trained on"):
        data.setup("fit")
    assert main(["check", str(tmp_path), "--workers=0"]) == 1
    assert "NO TRAINING  no object of" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["../train2017/", ""])
def test_two_images_of_one_file_are_refused(tmp_path, folder):
    write_coco(tmp_path)
    path = tmp_path / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    name = f"{folder or tmp_path / 'train2017/'}/5.png"
    content["images"].append({**content["images"][0], "id": 77, "file_name": name})
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"1 files .* are two images each, such as .*5.png \(5 and 77\)"):
        coco(tmp_path).setup("fit")


def test_exports_of_label_studio_are_read(tmp_path):
    for key, (height, width) in SIZES.items():
        save(picture(key, width, height), tmp_path / "images" / f"{key}.png")
    file = write_json(tmp_path / "result.json")
    content = json.loads(file.read_text())
    for image in content["images"]:
        image["file_name"] = f"images\\{image['file_name']}"
    file.write_text(json.dumps(content))
    data = coco(tmp_path, val_fraction=0.25)
    data.setup("fit")
    assert sum(trained(data)) == data.data_source.counts("train").sum() > 0


def test_a_validation_file_without_objects_is_named(tmp_path):
    write_coco(tmp_path, ("train",))
    write_coco(tmp_path, ("val",), [])
    with pytest.raises(UserError, match=r"val split .* has no objects, .*: its annotation file lists none"):
        coco(tmp_path).setup("fit")


def test_objects_that_are_there_twice_are_named(tmp_path, capsys):
    found = objects(lambda one: None)
    more = [{**found[0], "id": 77}, {**found[1], "id": 78, "category_id": 18}]
    write_coco(tmp_path, found=[*found, *more])
    assert main(["check", str(tmp_path), "--workers=0"]) == 0
    said = capsys.readouterr().out
    assert (
        "train     WARNING: objects: 1 with the image, class and box of another one, such as annotation 77 of" in said
    )


@pytest.mark.parametrize(("fraction", "code"), [(0.3, 1), (0.4, 0)])
def test_annotations_that_training_skips_are_no_failure(tmp_path, fraction, code, capsys):
    more = [annotation(100 + i, 5) | {"bbox": [1, 2, 3]} for i in range(8)]
    write_coco(tmp_path, found=[*objects(lambda one: None), *more])
    listed = tmp_path / "bad.csv"
    given = ["--data.skip_bad_annotations=true", f"--data.max_bad_fraction={fraction}", f"--output={listed}"]
    assert main(["check", str(tmp_path), "--workers=0", *given]) == code
    said = capsys.readouterr().out
    assert ("8 of 24 annotations are malformed and left out" in said) == (code == 0)
    assert listed.read_text().count("a field bbox that is not four finite numbers") == 16


def test_turned_images_are_named(tmp_path, capsys):
    write_coco(tmp_path)
    image = picture(5, SIZES[5][1], SIZES[5][0])
    exif = image.getexif()
    exif[274] = 3
    image.save(tmp_path / "train2017" / "5.png", exif=exif)
    assert main(["check", str(tmp_path), "--workers=0"]) == 0
    said = capsys.readouterr().out
    assert "1 images are turned by EXIF" in said
    assert "train2017/5.png" in said
