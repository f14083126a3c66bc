"""Objects in tables: a column of lists in one of the forms that programs write."""

import datasets
import numpy as np
import pytest

from linvit import UserError
from linvit.cli.data import main
from linvit.data import DetectionData
from linvit.io import coco_masks
from tests.data.images import picture, png

SIZES = [(40, 60), (60, 40), (50, 50), (44, 44)]  # height and width
BOXES = [[[32, 3, 20, 10], [5.5, 6, 30, 20]], [[21, 21, 10, 10]], [], [[4, 4, 30, 30]]]
KINDS = [[0, 2], [1], [], [2]]
NAMES = ["ant", "bee", "cat"]


def boxes_of(form):
    return [[[x, y, x + w, y + h] for x, y, w, h in own] for own in BOXES] if form == "xyxy" else BOXES


def write(path, form="lists", sizes=True, split="train", **changes):
    """Parquet with images and objects: as a struct of lists, a list of structs, with corners, words or bare numbers."""
    kinds = [[NAMES[kind] if form == "words" else kind + 7 * (form == "numbers") for kind in own] for own in KINDS]
    kind = datasets.Value("string" if form == "words" else "int64")
    kind = datasets.ClassLabel(names=NAMES) if form in ("lists", "structs", "xyxy") else kind
    cells = [{"bbox": boxes, "category": own} for boxes, own in zip(boxes_of(form), kinds, strict=True)]
    for name, values in changes.items():
        cells = [cell | {name: value} for cell, value in zip(cells, values, strict=True)]
    box = datasets.List(datasets.Value("float32"))
    more = (
        {"segmentation": datasets.List(datasets.List(datasets.Value("float64")))} if "segmentation" in changes else {}
    )
    fields = {"bbox": box, "category": kind, **more}
    if form == "structs":
        cells = [
            [dict(zip(cell, values, strict=True)) for values in zip(*cell.values(), strict=True)] for cell in cells
        ]
        feature = datasets.List(fields)
    else:
        feature = {name: datasets.List(field) for name, field in fields.items()}
    features = {"image": datasets.Image(), "objects": feature}
    columns = {"image": [{"bytes": png(picture(i, w, h)), "path": None} for i, (h, w) in enumerate(SIZES)]}
    if sizes:
        features |= dict.fromkeys(("height", "width"), datasets.Value("int64"))
        columns |= {"height": [h for h, _ in SIZES], "width": [w for _, w in SIZES]}
    rows = datasets.Dataset.from_dict({**columns, "objects": cells}, features=datasets.Features(features))
    rows.to_parquet(path / f"{split}.parquet")
    return path


def data(source, **options):
    return DetectionData(str(source), **{"batch_size": 2, "num_workers": 0, "seed": 0, "val_fraction": 0.25, **options})


@pytest.mark.parametrize(
    ("form", "sizes"), [("lists", True), ("structs", False), ("xyxy", True), ("words", False), ("numbers", True)]
)
def test_forms(tmp_path, form, sizes):
    made = data(write(tmp_path, form, sizes), box_format="xyxy" if form == "xyxy" else "xywh")
    expected = ["7", "8", "9"] if form == "numbers" else NAMES
    assert made.class_names == expected
    assert made.category_ids == {"words": [1, 2, 3], "numbers": [7, 8, 9]}.get(form, [0, 1, 2])
    made.setup("fit")
    assert made.data_source.sizes("train").tolist() == [list(size) for size in SIZES]
    write(tmp_path, form, sizes, split="test")
    made = data(tmp_path, box_format=made.data_source.box_format)
    made.setup("test")
    found = [made.on_after_batch_transfer(batch, 0) for batch in made.test_dataloader()]
    boxes = [own.numpy() for batch in found for own in batch["boxes"]]
    for own, given in zip(boxes, boxes_of("xyxy"), strict=True):
        np.testing.assert_allclose(own, np.array(given).reshape(-1, 4))
    assert [own.tolist() for batch in found for own in batch["labels"]] == KINDS
    assert found[0]["area"][0].tolist() == [200, 600]
    assert "image_id" not in found[0]


def test_polygons(tmp_path):
    triangles = [[[[x, y, x + w, y, x, y + h]] for x, y, w, h in own] for own in BOXES]
    made = data(write(tmp_path, "structs", segmentation=triangles), masks=True)
    write(tmp_path, "structs", split="test", segmentation=triangles)
    made.setup("test")
    for sample, polygons, size in zip(made.test_set, triangles, SIZES, strict=True):
        assert sample["rles"] == [coco_masks.from_polygons(one, size) for one in polygons]
        assert sample["area"].tolist() == [w * h for *_, w, h in BOXES[sample["index"]]]
    made.setup("fit")
    batch = next(iter(made.train_dataloader()))
    assert all(len(own) for own in batch["masks"])


def test_names_for_numbers(tmp_path):
    assert data(write(tmp_path, "numbers"), class_names=NAMES).class_names == NAMES
    with pytest.raises(UserError, match=r"class_names has 2 names, but .* of 3 categories"):
        assert data(tmp_path, class_names=NAMES[:2]).num_classes


def test_what_is_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match=r"no column 'object'.*Did you mean 'objects'"):
        data(tmp_path, object_column="object").setup("fit")
    with pytest.raises(UserError, match=r"holds no objects .bbox, category., but"):
        data(tmp_path, object_column="width").setup("fit")
    with pytest.raises(UserError, match=r"have no masks .'segmentation'."):
        data(tmp_path, masks=True).setup("fit")
    with pytest.raises(UserError, match=r"are they xywh"):
        data(tmp_path, box_format="xyxy").setup("fit")


def test_malformed_boxes_of_a_table_are_counted_and_may_be_skipped(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "BOXES", [[[1, 2, 3], [5.5, 6, 30, 20]], [None], [], [[4, float("nan"), 30, 30]]])
    write(tmp_path)
    with pytest.raises(UserError, match=r"3 of the 4 annotations in the train split .*3 with a box that is not four"):
        data(tmp_path).setup("fit")
    made = data(tmp_path, skip_bad_annotations=True, val_fraction=0.1)
    with pytest.warns(UserWarning, match="3 of the 4 annotations"):
        made.setup("fit")
    assert [sample["labels"].tolist() for sample in made.train_set] == [[2]]


def test_images_without_objects_are_only_predicted(tmp_path):
    rows = datasets.Dataset.from_dict(
        {"image": [{"bytes": png(picture()), "path": None}]}, features=datasets.Features({"image": datasets.Image()})
    )
    rows.to_parquet(tmp_path / "test.parquet")
    made = data(write(tmp_path))
    made.setup("predict")
    assert next(iter(made.predict_dataloader()))["size"] == [(10, 12)]
    with pytest.raises(UserError, match=r"the test split of .* has no objects, so it can only be predicted"):
        made.setup("test")


def test_lists_of_different_lengths_are_named(tmp_path):
    """Each object needs a box and a category; numpy would stop with shapes that do not fit."""
    features = {"image": datasets.Image(), "objects": {"bbox": datasets.List(datasets.List(datasets.Value("float32")))}}
    features["objects"]["category"] = datasets.List(datasets.Value("int64"))
    cells = [{"bbox": [[1, 2, 3, 4]] * 2, "category": [0]}] * 4
    columns = {"image": [{"bytes": png(picture(i, 60, 40)), "path": None} for i in range(4)], "objects": cells}
    datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(UserError, match="row 0 of column 'objects' has 2 of bbox, 1 of category"):
        data(tmp_path).setup("fit")


@pytest.mark.parametrize("missing", [None, [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]], ids=["none", "odd"])
def test_masks_that_cannot_be_read_are_malformed(tmp_path, missing, capsys):
    """`linvit data check` was content, and training stopped at the images."""
    masks = [[[[x, y, x + w, y, x + w, y + h]] for x, y, w, h in own] for own in BOXES]
    masks[0][1] = missing
    write(tmp_path, segmentation=masks)
    assert main(["check", str(tmp_path), "--workers=0", "--masks", "--val_fraction=0.25"]) == 1
    assert "1 with no segmentation, or a malformed one" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"1 of the 4 annotations .* --data.skip_bad_annotations=true"):
        data(tmp_path, masks=True).setup("fit")
    made = data(tmp_path, masks=True, skip_bad_annotations=True, max_bad_fraction=0.25)
    with pytest.warns(UserWarning, match="They are left out"):
        made.setup("fit")
    sets = made.train_set, made.val_set
    assert sum(len(own[i]["boxes"]) for own in sets for i in range(len(own))) == 3
