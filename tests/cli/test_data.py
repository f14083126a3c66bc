"""`linvit data check`: what is found in a set, how it is told, exit codes."""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

import linvit.cli
import linvit.data
from linvit.cli.data import TASKS, main
from linvit.runs.parser import options_of
from tests.data.damaged import damaged, encoded, photo
from tests.data.images import image_folder, picture, plain_table, save
from tests.rasters import values, write


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("set") / "damaged"


@pytest.fixture(scope="module")
def expected(root):
    return damaged(root, good=3)


def test_the_damaged_set(root, expected, tmp_path, capsys):
    listed = tmp_path / "bad.csv"
    assert main(["check", str(root), "--workers", "0", "--output", str(listed)]) == 1
    bad = {str(root / path): wrong for path, wrong in expected.items() if wrong is not None}
    with listed.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["split", "image", "reason"]
    assert {image: split for split, image, _ in rows} == dict.fromkeys(bad, "train")
    assert all(bad[image] in reason and reason for _, image, reason in rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{root}: 27 images, 2 classes"
    assert "  train               24 images, 11 to 13 of each class" in lines
    assert "  val                  3 images, 1 to 2 of each class" in lines
    formats = next(line for line in lines if line.startswith("  formats   JPEG of 3 x uint8 "))
    assert all(kind in formats for kind in ("PNG of 3 x uint8", "GIF of 3 x uint8", "turned by EXIF 1"))
    assert "  height    48 to 56, median 56" in lines  # one is turned
    assert "  10 BAD IMAGES" in lines
    assert sum(line.startswith(f"    {root}/train/ant/") for line in lines) == 10
    assert "  WARNING: images in two splits: 1" in lines
    assert f"    train: {root}/train/bee/1.jpg  =  val: {root}/val/bee/copy.jpg" in lines


def test_files_that_are_not_read_are_named(tmp_path, capsys):
    image_folder(tmp_path, ["train", "val"])
    for name in ("a.HEIC", "b.heic", "c.docx", "labels.csv", ".hidden.heic"):
        (tmp_path / "train" / "ant" / name).touch()
    assert main(["check", str(tmp_path), "--workers", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("  WARNING: files that are not read: 3")
    assert lines[at + 1 : at + 3] == [
        f"    2 .heic, such as {tmp_path}/train/ant/a.HEIC",
        f"    1 .docx, such as {tmp_path}/train/ant/c.docx",
    ]


def test_images_that_are_only_to_be_predicted(tmp_path, capsys):
    plain_table(tmp_path / "test.parquet", 4)
    assert main(["check", str(tmp_path), "--workers", "0"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}: 4 images, no labels\n  test                 4 images\n")


class TestTraining:
    """What `linvit fit` would refuse."""

    def told(self, folder, capsys, code=1):
        assert main(["check", str(folder), "--workers", "0"]) == code
        return capsys.readouterr().out

    def test_a_misspelt_class(self, tmp_path, capsys):
        folder = image_folder(tmp_path / "data", ["train"], ["cat", "dog"])
        image_folder(folder, ["val"], ["cats", "dog"])
        assert "NO TRAINING  the val split of" in (out := self.told(folder, capsys))
        assert "has classes without training images: 'cats'. Did you mean 'cat'?" in out

    def test_images_without_a_class(self, tmp_path, capsys):
        for split in ("train", "val"):
            save(picture(0), tmp_path / split / "0.png")
        assert "images directly in train/ have no class" in self.told(tmp_path, capsys)

    def test_a_table_without_labels(self, tmp_path, capsys):
        plain_table(tmp_path / "train.parquet", 4, kind=["a", "b"] * 2)
        assert "--data.label_column (it has: kind)" in self.told(tmp_path, capsys)

    def test_too_few_images(self, tmp_path, capsys):
        plain_table(tmp_path / "train.parquet", 1, label=[0])
        assert "would leave none to train on" in self.told(tmp_path, capsys)

    def test_a_class_without_validation_images_and_an_empty_one_are_warnings(self, tmp_path, capsys):
        folder = image_folder(tmp_path / "data", ["train"], ["cat", "dog"])
        image_folder(folder, ["val"], ["dog"])
        (folder / "train" / "cow").mkdir()
        out = self.told(folder, capsys, code=0)
        assert f"  WARNING: no images in '{folder}/train/cow'" in out
        assert re.search(r"  WARNING: the val split of .* has no images of some trained classes: 'cat'", out)

    @pytest.mark.parametrize("option", ["--data.num_classes=3", "--val_fraction 0.99"])
    def test_options_of_training_count(self, tmp_path, capsys, option):
        """They were refused, or taken and not used."""
        folder = image_folder(tmp_path / "data", ["train"], ["cat", "dog"])
        arguments = ["check", str(folder), "--workers", "0"]
        assert main(arguments) == 0
        assert main([*arguments, *option.split()]) == 1
        assert "NO TRAINING  data source" in capsys.readouterr().out

    def test_a_set_without_a_training_split(self, tmp_path, capsys):
        out = self.told(image_folder(tmp_path / "data", ["val"]), capsys)
        assert "has no train split; it has: val" in out

    def test_masks_that_training_refuses(self, tmp_path, capsys):
        """Masks of one split alone passed."""
        for number in range(4):
            for name in ("train/images", "train/masks", "val/images"):
                save(picture(number, mode="L").point(lambda value: value % 2), tmp_path / name / f"{number}.png")
        assert main(["check", str(tmp_path), "--workers", "0", "--num_classes", "2"]) == 1
        assert "NO TRAINING  the val split of data source" in capsys.readouterr().out

    def test_an_unlabelled_test_split_is_none_of_its_business(self, tmp_path, capsys):
        folder = image_folder(tmp_path / "data", ["train", "val"])
        save(picture(99), folder / "test" / "0.png")
        assert "  test                 1 images, no labels" in self.told(folder, capsys, code=0)


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_what_images_of_other_bands_need_is_printed_and_is_enough(tmp_path, capsys, task):
    """The options that it prints are what it takes to make the set good."""
    folder = tmp_path / "scenes"
    for index in range(4):
        split, array = ("train", "val")[index % 2], values(index)
        if task == "classification":
            write(folder / split / "ab"[index // 2] / f"{index}.tif", array)
        else:
            write(folder / split / "images" / f"{index}.tif", array)
            write(folder / split / "masks" / f"{index}.tif", array[:1].astype(np.uint8) % 2)
    given = ["check", str(folder), "--workers", "0", *(["--num_classes", "2"] if task == "segmentation" else [])]
    assert main(given) == 1
    said = capsys.readouterr().out
    assert "it has 4 bands of uint16, and without --data.bands" in said
    assert "  bands     4 of uint16 (2 images)" in said
    (options,) = [line.split()[1:] for line in said.splitlines() if line.startswith("  options ")]
    assert [option.partition("=")[0] for option in options] == [
        *("--data.bands", "--data.value_range", "--data.mean", "--data.std")
    ]
    low, high = json.loads(options[1].partition("=")[2])[0]
    assert 0 <= low < 100
    assert 8900 < high <= 9000
    assert json.loads(options[2].partition("=")[2]) == pytest.approx([0.5] * 4, abs=0.03)
    taken = [part for option in options[:2] for part in option.replace("--data.", "--").split("=")]
    assert main([*given, *taken]) == 0
    assert "no bad images" in capsys.readouterr().out


class TestHints:
    """What it proposes can be typed as it is."""

    def out(self, folder, capsys, *options, code):
        assert main(["check", str(folder), "--workers", "0", *options]) == code
        return capsys.readouterr().out

    def test_the_column_of_labels(self, tmp_path, capsys):
        plain_table(tmp_path / "train.parquet", 12, kind=["007", "7"] * 6)
        hint, column = re.search(
            r"(--data\.\w+) \(it has: (\w+)\)", self.out(tmp_path, capsys, "--num_classes=2", code=1)
        ).groups()
        assert "12 images, 2 classes" in self.out(tmp_path, capsys, hint, column, code=0)

    @pytest.mark.parametrize("folders", [("pictures", "pictures_mask"), ("a", "b")])
    def test_masks_that_look_like_a_class(self, tmp_path, capsys, folders):
        """By their name, or by few colours."""
        for split in ("train", "val"):
            for number in range(2):
                image = picture(number + 2 * (split == "val"), 30, 20)
                save(image, tmp_path / split / folders[0] / f"{number}.png")
                save(image.convert("L").point(lambda value: value % 2), tmp_path / split / folders[1] / f"{number}.png")
        said = self.out(tmp_path, capsys, code=1)
        files = [tmp_path / "train" / folder / "0.png" for folder in folders]
        assert f"'{files[1]}' is a mask of '{files[0]}'" in said
        as_masks, as_classes = re.findall(r"(?:--data\S*=\w+ ?)+", said)
        self.out(tmp_path, capsys, as_classes, code=0)
        for split in ("train", "val"):
            for old, new in zip(folders, ("images", "masks"), strict=True):
                (tmp_path / split / old).rename(tmp_path / split / new)
        assert "task      SegmentationData" in self.out(tmp_path, capsys, code=1)
        assert "2 masks" in self.out(tmp_path, capsys, *as_masks.replace("=N", "=2").split(), code=0)

    @pytest.mark.parametrize(
        "names",
        [
            ("a/images/{}.png", "a/masks/of_{}.png"),
            ("{}.jpg", "{}_mask.png"),
            ("a/images_png/{}.png", "a/masks_png/{}.png"),
        ],
    )
    def test_masks_that_lie_beside_images_or_below_classes(self, tmp_path, capsys, names):
        for number in range(2):
            image = picture(number, 30, 20)
            save(image, tmp_path / "train" / names[0].format(number))
            save(image.convert("L").point(lambda value: value % 2), tmp_path / "train" / names[1].format(number))
            if names[0].startswith("a/"):
                save(picture(number + 9, 30, 20), tmp_path / "train" / "b" / f"{number}.png")
        said = self.out(tmp_path, capsys, code=1)
        assert (
            f"'{tmp_path / 'train' / names[1].format(0)}' is a mask of '{tmp_path / 'train' / names[0].format(0)}'"
            in said
        )

    @pytest.mark.parametrize(
        ("table", "text", "named"),
        [
            ("train.csv", "id,label\n{}.png,a\n", True),
            ("labels.csv", "image_id,species\n{},a\n", True),
            ("list.tsv", '"path"\t"x"\n"train/{}.png"\t1\n', True),
            ("results.csv", "epoch,loss\n{},0.5\n", False),
        ],
    )
    def test_tables_that_name_images(self, tmp_path, capsys, table, text, named):
        """Images without a class beside a table that may have it are not only to be predicted."""
        for number in range(3):
            save(picture(number), tmp_path / f"{number}.png")
        first, *row = text.splitlines(keepends=True)
        lines = (
            [line.format(number) for number in (0, 1, 2, 0, 1, 2) for line in row or [first]] if "{}" in text else row
        )
        (tmp_path / table).write_text("".join([first] * bool(row) + lines))
        said = self.out(tmp_path, capsys, code=int(named))
        assert (f"Tables that are not read name the images: '{tmp_path / table}'" in said) == named
        for number in range(4):
            save(picture(number + 9), tmp_path / f"class{number % 2}" / f"1{number}.png")
        assert ("WARNING: tables that name images are not read" in self.out(tmp_path, capsys, code=0)) == named

    def test_every_option_in_a_message_of_the_data_is_one(self):
        sources = [file.read_text(encoding="utf-8") for file in Path(linvit.data.__file__).parent.rglob("*.py")]
        named = {name for text in sources for name in re.findall(r"--data\.([a-z_.]*[a-z_])", text)}
        assert len(named) > 20
        known = {name for task in TASKS for name in options_of(task)}
        assert named - {"augmentation"} <= known


@pytest.mark.parametrize("classes", [("left", "right"), ("with_mask", "without_mask")])
def test_class_folders_with_files_called_alike_are_no_masks(tmp_path, capsys, classes):
    folder = image_folder(tmp_path / "data", ["train", "val"], classes)
    for number, path in enumerate(sorted(folder.rglob("*.png"))):
        save(picture(number, 30, 20), path)
    assert main(["check", str(folder), "--workers", "0"]) == 0


def test_the_task_is_the_one_that_is_asked_for_or_that_has_the_options(tmp_path, capsys):
    folder = image_folder(tmp_path / "data", ["train", "val"])
    arguments = ["check", str(folder), "--workers", "0"]
    assert "no masks" in refusal(main, [*arguments, "--mask_suffix", "_gt", "--num_classes=2"], capsys)
    assert "no masks" in refusal(main, [*arguments, "--data=SegmentationData", "--num_classes=2"], capsys)
    text = refusal(main, ["check", "recall", "--label_column", "x"], capsys)
    assert text == (
        "'recall' is checked for DiagnosticData, which has no option data.label_column; leave it out, or choose "
        "another task: --data ClassificationData"
    )


def refusal(call, arguments, capsys):
    """What a refused check says, as an error or in its report."""
    try:
        assert call(arguments) == 1
    except linvit.UserError as error:
        return str(error)
    return capsys.readouterr().out


def test_labels_are_looked_at_too(tmp_path, capsys):
    plain_table(tmp_path / "train-0.parquet", 4, label=[0, 1, 0, 1])
    plain_table(tmp_path / "validation-0.parquet", 4, label=[0, 5, 0, 3])
    assert main(["check", str(tmp_path), "--workers", "0"]) == 1
    out = capsys.readouterr().out
    assert "BAD LABELS  2 of 4 labels in the val split" in out
    assert "row 1 (stored in the table) has 5, row 3" in out
    assert "WARNING: images in two splits: 4" in out  # the images of both tables are the same


def test_many_bad_images_are_not_all_printed(tmp_path, capsys):
    (tmp_path / "train").mkdir()
    for number in range(30):
        (tmp_path / "train" / f"{number:02}.jpg").touch()
    assert main(["check", str(tmp_path), "--workers", "0"]) == 1
    out = capsys.readouterr().out
    assert "30 BAD IMAGES" in out
    assert "19.jpg: an empty file\n    and 10 more; --output FILE lists all\n" in out
    assert "20.jpg" not in out


def test_the_limit_of_pixels(tmp_path, capsys):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "x.jpg").write_bytes(encoded(photo(0), "JPEG"))
    assert main(["check", str(tmp_path), "--workers", "0", "--max_pixels", "100"]) == 1
    assert "48 x 56 pixels are more than the limit, 100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no data at 'nowhere'"),
        (["digits", "--workers", "-1"], "--workers must be a whole number at least 0; got -1"),
        (["digits", "--output", "nowhere/bad.csv"], "cannot write 'nowhere/bad.csv': the folder"),
        (["digits", "--image_column", "imgae"], "Did you mean 'image'?"),
    ],
)
def test_mistakes_are_user_errors_before_any_image_is_read(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("linvit.cli.data.scan", lambda *args: pytest.fail("started"))
    with pytest.raises(linvit.UserError) as error:
        main(["check", *arguments])
    assert message in str(error.value)
