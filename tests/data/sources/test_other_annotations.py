"""Folders of images with annotations that are not read, and files of COCO that are left out, are named."""

import json
import shutil
import warnings

import pytest

from linvit import UserError
from linvit.cli.data import main
from linvit.data import DetectionData
from linvit.data.sources.coco import find_coco, load_coco
from linvit.data.sources.mask_folders import ENDING
from linvit.data.sources.other_annotations import other_annotations
from tests.data.coco import SIZES, write_coco, write_json
from tests.data.images import picture, save

YOLO = "0 0.5 0.5 0.2 0.2\n1 .3 .3 0.1 1.0\n"
VOC = "<?xml version='1.0'?>\n<!-- by > hand -->\n<annotation verified='no'><object/></annotation>"
CVAT = "<?xml version='1.0' encoding='utf-8'?>\n<annotations><version>1.1</version></annotations>"
LABELME = json.dumps({"version": "5", "shapes": [], "imagePath": "5.png", "imageData": None})
VIA = json.dumps({"5.png": {"filename": "5.png", "regions": {}}})
CREATE_ML = json.dumps([{"image": "5.png", "annotations": []}])
PANOPTIC = json.dumps({"images": [], "annotations": [{"segments_info": []}], "categories": []})
STUDIO = json.dumps([{"id": 1, "data": {"image": "5.png"}, "annotations": []}])
DOTA = "imagesource:GoogleEarth\ngsd:0.1\n1 1 20.5 1 20 20 1 20 plane 0\n"
OBJECTS = '{"file_name": "5.png", "objects": {"bbox": [[1, 2, 9, 9]], "category": [0]}}\n'
KITTI = "Car 0.00 0 -1.58 587.01 173.33 614.12 200.12 1.65 1.67 3.64 -0.65 1.71 46.70 -1.59\n"


def write(folder, **files):
    """Images in `images/`, or in the folders before "*" in the names of the files; and text files."""
    for name, content in files.items():
        place = folder / (name.partition("*")[0] if "*" in name else "images")
        for key, (height, width) in SIZES.items():
            save(picture(key, width, height), place / f"{key}.png")
        path = folder / name.replace("*", "")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({"labels/5.txt": YOLO}, "YOLO"),
        ({"labels/classes.txt": "red\nblue\n", "labels/2.txt": "", "labels/5.txt": YOLO}, "YOLO"),
        ({"train/images*/../labels/5.txt": YOLO, "valid/images*/../labels/5.txt": YOLO}, "YOLO"),
        ({"train/*5.txt": YOLO, "val/*5.txt": YOLO}, "YOLO"),
        ({"*5.txt": YOLO}, "YOLO"),
        ({"obj_train_data/*5.txt": YOLO, "obj_train_data/*../train.txt": "data/obj_train_data/5.png\n"}, "YOLO"),
        ({"Annotations/5.xml": VOC}, "Pascal VOC"),
        ({"VOCdevkit/VOC2007/JPEGImages*/../Annotations/5.xml": VOC}, "Pascal VOC"),
        ({"train/*5.xml": VOC, "test/*5.xml": VOC}, "Pascal VOC"),
        ({"annotations.xml": CVAT}, "CVAT for images"),
        ({"*5.json": LABELME}, "LabelMe"),
        ({"train/*via_region_data.json": VIA}, "VGG Image Annotator"),
        ({"train/*_annotations.createml.json": CREATE_ML}, "CreateML"),
        ({"project-1-at-2026.json": STUDIO}, "Label Studio JSON"),
        ({"annotations/panoptic_train2017.json": PANOPTIC}, "COCO's panoptic segmentation"),
        ({"labels/det_train.json": json.dumps([{"name": "5.png", "labels": []}])}, "BDD100K"),
        ({"ds/img/*../ann/5.png.json": json.dumps({"size": {}, "objects": []})}, "Supervisely"),
        ({"split/train_gt.txt": "0--Parade/5.png\n1\n4 4 12 14 0 0 0 0 0 0\n"}, "WIDER FACE"),
        ({"annotations/5.txt": "4,5,12,14,1,4,0,0\n"}, "MOT or VisDrone"),
        ({"labelTxt/5.txt": DOTA}, "DOTA"),
        ({"label_2/5.txt": KITTI}, "KITTI"),
        ({"gt/gt.txt": "1,1,10,10,20,20,1,1,1.0\n"}, "MOT or VisDrone"),
        ({"train/*_annotations.csv": "filename,width,height,class,xmin,ymin,xmax,ymax\n"}, "CSV"),
        ({"train.csv": 'image_id,width,height,"bbox",source\n'}, "CSV"),
    ],
)
def test_other_formats_are_named(tmp_path, files, kind):
    write(tmp_path, **files)
    assert f"' has the format {kind}. Convert the annotations to COCO's JSON of instances" in other_annotations(
        tmp_path
    )
    assert DetectionData.recognises(str(tmp_path))


def test_texts_and_names_that_patterns_match_in_many_ways_take_no_time(tmp_path):
    """Both took twice as long with each repetition."""
    write(tmp_path, **{"train/*5.xml": "<!>" * 1000})
    assert other_annotations(tmp_path) == ""
    assert ENDING.sub("", "gt" * 100 + "1_gtFine_labelIds") == "gt" * 100 + "1"


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("export.json", "annotations.json"),
        ("train_coco.json", "train.json"),
        ("annotations/coco_Val.json", "annotations/val.json"),
        ("annotations/person_keypoints_train2017.json", "annotations/train2017.json"),
        ("annotations/person_keypoints_default.json", "annotations/instances_default.json"),
        ("train/*labels.json", "train/annotations.json"),
    ],
)
def test_files_of_coco_with_other_names_are_named(tmp_path, name, better):
    write(tmp_path, **{name: write_json(tmp_path / "x.json").read_text()})
    (tmp_path / "x.json").unlink()
    assert find_coco(tmp_path) == {}
    assert other_annotations(tmp_path).endswith(f"linvit does not know its name. Call it '{tmp_path / better}'")
    (tmp_path / name.replace("*", "")).rename(tmp_path / better)
    assert [*find_coco(tmp_path).values()] == [tmp_path / better]


def test_annotations_one_folder_below_are_named(tmp_path, capsys):
    write_coco(tmp_path / "coco")
    assert main(["check", str(tmp_path), "--workers=0"]) == 1
    said = capsys.readouterr().out
    assert f"COCO's files are one folder below. Give '{tmp_path / 'coco'}'" in said


@pytest.mark.parametrize(
    ("files", "task"),
    [
        ({"train/cat/*5.txt": YOLO, "train/dog/*5.xml": VOC}, "ClassificationData"),
        ({"train/*metadata.csv": "file_name,label\n5.png,a\n2.png,b\n", "train/*5.txt": YOLO}, "ClassificationData"),
        (
            {"*notes.txt": "0.5 is the threshold\n", "*meta/train.json": '{"a": 1}', "*y.csv": "name,size\n"},
            "ClassificationData",
        ),
        ({"train/cat/*5.txt": YOLO, "train/dog/*notes.md": "", "*train.json": '{"cat": ["5"]}'}, "ClassificationData"),
        ({"images/*../labels/5.txt": YOLO, "labels/*": None}, "SegmentationData"),
        ({"train/*metadata.jsonl": OBJECTS}, "DetectionData"),
        ({"val/*metadata.jsonl": OBJECTS}, "DetectionData"),
    ],
)
def test_what_can_be_read_comes_first(tmp_path, files, task, capsys):
    if masks := [name for name, content in files.items() if content is None]:
        for key, (height, width) in SIZES.items():
            save(
                picture(key, width, height).convert("L").point(lambda level: level % 2),
                tmp_path / "labels" / f"{key}.png",
            )
    write(tmp_path, **{name: content for name, content in files.items() if name not in masks})
    main(["check", str(tmp_path), "--workers=0"])
    said = capsys.readouterr().out
    assert f"{task}; --data chooses another" in said
    assert ("WARNING: annotations of objects are not used: '" in said) == (YOLO in files.values())


def loaded(folder):
    """What is warned of when COCO's files are read."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_coco(folder, masks=False)
    return [str(one.message) for one in caught]


def test_names_of_splits_are_found_in_any_case(tmp_path):
    for split in ("Train", "Validation"):
        for key, (height, width) in SIZES.items():
            save(picture(key, width, height), tmp_path / "images" / split / f"{key}.png")
        write_json(tmp_path / "annotations" / f"instances_{split}.json")
    assert [*find_coco(tmp_path)] == ["train", "val"]
    assert loaded(tmp_path) == []


def test_what_is_left_out_is_named(tmp_path):
    write_coco(tmp_path)
    assert loaded(tmp_path) == []
    write_json(tmp_path / "train.json")
    (said,) = loaded(tmp_path)
    assert f"left out are '{tmp_path / 'train.json'}'" in said
    (tmp_path / "train.json").unlink()
    (tmp_path / "annotations" / "instances_val2017.json").rename(tmp_path / "annotations" / "val_v2.json")
    with pytest.raises(UserError, match=f"the images in '{tmp_path / 'val2017'}' have no annotation file"):
        loaded(tmp_path)
    shutil.rmtree(tmp_path / "val2017")
    save(picture(1, 40, 40), tmp_path / "train2017" / "new.png")
    (said,) = loaded(tmp_path)
    assert said.endswith(f"no annotation file lists them: '{tmp_path / 'train2017' / 'new.png'}'")


def test_one_file_for_folders_of_splits_leaves_nothing_out(tmp_path):
    content = json.loads(write_json(tmp_path / "annotations.json").read_text())
    for image, split in zip(content["images"], ("train", "train", "val", "val"), strict=True):
        save(picture(image["id"], image["width"], image["height"]), tmp_path / "images" / split / image["file_name"])
        image["file_name"] = f"{split}/{image['file_name']}"
    (tmp_path / "annotations.json").write_text(json.dumps(content))
    assert loaded(tmp_path) == []


@pytest.mark.parametrize("name", ["/data/upload/3/{}.png", "../../media/{}.png", "{}.PNG", "images/%{:02X}.png"])
def test_names_that_are_not_quite_those_of_the_files_are_named(tmp_path, name):
    write(tmp_path, **{"images/*a.txt": ""})
    content = json.loads(write_json(tmp_path / "result.json").read_text())
    for image in content["images"]:
        if "%" in name:
            (tmp_path / "images" / image["file_name"]).rename(tmp_path / "images" / f"{chr(image['id'] + 32)}.png")
        image["file_name"] = name.format(image["id"] + 32 * ("%" in name))
    (tmp_path / "result.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=f"file_name '.*', but the file is '{tmp_path / 'images'}/.*.png': write"):
        load_coco(tmp_path, masks=False)
