"""Tables beside images: text in them is text, and a whole number is one only if all are."""

import os

import datasets
import pytest

import linvit
from linvit.cli.data import main
from linvit.data import ClassificationData
from linvit.data.sources.metadata import find_table
from linvit.data.sources.splits import load_splits
from linvit.io.reading import MOST
from tests.data.images import picture, save


def write(root, name="metadata.csv", text=None, **splits):
    """Images of each split, and a table of their labels."""
    for split, labels in splits.items():
        for number in range(len(labels)):
            save(picture(number), root / split / f"{number}.png")
        lines = [f"{number}.png,{label}" for number, label in enumerate(labels)]
        (root / split / name).write_text(text or "\n".join(["file_name,label", *lines]), encoding="utf-8")
    return root


def columns(root, split="train"):
    rows = load_splits(str(root))[split]
    return {name: rows[name][:] for name in rows.column_names if name != "image"}


def test_only_the_first_line_is_read_to_find_a_table(tmp_path):
    table = tmp_path / "metadata.csv"
    table.write_text("label,file_name\n")
    os.truncate(table, MOST + 1)  # more than is ever read; it takes no place
    assert find_table(tmp_path) == table


WORDS = [
    *("007 7 0", "7 007 08", "NA ant bee", "None null nan", "NULL N/A n/a", "True False True", "yes no yes"),
    *("1e5 1E5 100000", "1.0 2.0 1.0", "1 1.0 2", "2020-01-01 2020-01-02 01.02.2020", "inf -inf 3", "1_000 1000 2"),
    *("0x10 16 1", "+1 1 2", "-0 0 1", "12345678901234567890 1 2", "٣ 3 4", "00 0 1"),
]


@pytest.mark.parametrize("labels", WORDS)
def test_words_are_classes_as_they_are_written(tmp_path, labels):
    root = write(tmp_path, train=labels.split())
    assert columns(root) == {"label": labels.split()}
    data = ClassificationData(str(root), num_workers=0, img_size=8)
    assert data.class_names == sorted({*labels.split()})


def test_whole_numbers_stay_classes_by_their_number(tmp_path):
    root = write(tmp_path, train=[3, 0, 1], val=[1, 0, 3], test=[-1, -1])
    assert [columns(root, split)["label"] for split in ("train", "val", "test")] == [[3, 0, 1], [1, 0, 3], [-1, -1]]
    data = ClassificationData(str(root), num_workers=0, img_size=8)
    assert (data.num_classes, data.class_names) == (4, None)


def test_all_splits_are_read_alike(tmp_path):
    """Of one split of numbers and one of words, both are words."""
    root = write(tmp_path, train=["1", "2", "x"], val=["1", "2"], test=["", ""])
    assert [columns(root, split)["label"] for split in ("val", "test")] == [["1", "2"], [None, None]]
    assert ClassificationData(str(root), num_workers=0, img_size=8).class_names == ["1", "2", "x"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metadata.csv", 'file_name;label\n0.png;"a;1"\n1.png;007\n'),
        ("metadata.csv", '\ufefffile_name, label\r\n0.png,"a;1"\r\n1.png,007\r\n'),
        ("metadata.tsv", "file_name\tlabel\n0.png\ta;1\n1.png\t007\n"),
        ("metadata.jsonl", '{"file_name": "0.png", "label": "a;1"}\n{"file_name": "1.png", "label": "007"}\n'),
    ],
    ids=["semicolons", "byte order mark", "tabs", "JSON lines"],
)
def test_files_of_every_kind(tmp_path, name, text):
    assert columns(write(tmp_path, name, text, train=[0, 0])) == {"label": ["a;1", "007"]}


def test_json_lines_have_the_kinds_that_they_are_written_with(tmp_path):
    text = (
        '{"file_name": "0.png", "label": "2020-01-01", "size": 7}\n{"file_name": "1.png", "label": null, "size": 7.5}'
    )
    assert columns(write(tmp_path, "metadata.jsonl", text, train=[0, 0])) == {
        "label": ["2020-01-01", None],
        "size": [7.0, 7.5],
    }


def test_names_of_columns_are_text_too(tmp_path):
    root = write(tmp_path, text="file_name,007,1e5\n0.png,a,3\n1.png,b,4\n", train=[0, 0])
    assert columns(root) == {"007": ["a", "b"], "1e5": [3, 4]}
    assert ClassificationData(str(root), label_column="007", num_workers=0).class_names == ["a", "b"]
    assert main(["check", str(root), "--workers", "0", "--label_column", "007", "--val_fraction=0.5"]) == 0


def test_other_files_that_a_row_names_are_images(tmp_path):
    save(picture(5, mode="L"), tmp_path / "train" / "masks" / "0.png")
    rows = load_splits(str(write(tmp_path, text="file_name,mask_file_name\n0.png,masks/0.png\n", train=[0])))["train"]
    assert isinstance(rows.features["mask"], datasets.Image)
    assert rows[0]["mask"].mode == "L"


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("metadata.csv", "file_name,label\n../0.png,1\n", r"names '\.\./0\.png'; it can only name files in its folder"),
        ("metadata.csv", "file_name,label\n/etc/passwd,1\n", "it can only name files in its folder"),
        ("metadata.csv", "file_name,label\nhttp://127.0.0.1/0.png,1\n", "it can only name files in its folder"),
        ("metadata.csv", "file_name,label\n0.png,1\n9.jpg,1\n", "names 1 of 2 images that do not exist: '.*/9.jpg'"),
        ("metadata.csv", "file_name,label\n0.png,a,b\n", "line 2 has 3 cells, the first line 2"),
        ("metadata.csv", "file_name,label,label\n0.png,a,b\n", "there are two columns 'label'"),
        ("metadata.csv", "my_file_name,label\n0.png,a\n", "has no column 'file_name'. Did you mean 'my_file_name'"),
        ("metadata.csv", 'file_name,label\n0.png,"a\n', "cannot read '.*metadata.csv': unexpected end of data"),
        ("metadata.jsonl", '{"file_name": "0.png", "label": 7}\n{"file_name": "1.png", "label": "7"}', "several kinds"),
        ("metadata.jsonl", '{"file_name": "0.png"', "cannot read '.*metadata.jsonl': "),
        ("metadata.jsonl", '["file_name"]', "a line is no mapping"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(tmp_path, name, text, told):
    with pytest.raises(linvit.UserError, match=told):
        load_splits(str(write(tmp_path, name, text, train=[0, 0])))


def test_a_byte_that_is_not_utf_8(tmp_path):
    root = write(tmp_path, train=["a"])
    (root / "train" / "metadata.csv").write_bytes(b"file_name,label\n0.png,\xe9t\xe9\n")
    with pytest.raises(linvit.UserError, match=r"cannot read '.*metadata.csv': 'utf-8' codec"):
        load_splits(str(root))


def test_a_table_beside_folders_of_classes_is_not_read(tmp_path):
    for name in "ab":
        save(picture(0), tmp_path / "train" / name / "0.png")
    (tmp_path / "train" / "metadata.csv").write_text("file_name,label\na/0.png,x\nb/0.png,y\n")
    with pytest.warns(UserWarning, match="left out of .*: 'metadata.csv', since the folders are the classes"):
        assert load_splits(str(tmp_path))["train"].features["label"].names == ["a", "b"]
