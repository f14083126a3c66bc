"""Segmentation data from folders and tables: what is read, what samples and batches are, and what is refused."""

import json
import re
import shutil

import datasets
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from linvit.cli.data import main
from linvit.data import ClassificationData, SegmentationData
from linvit.data.sources.pairs import load_pairs
from linvit.data.transforms.segmentation import SegmentationAugmentation
from linvit.errors import UserError
from linvit.runs.configs import CONFIGS
from tests.data.images import picture, png, save

STILL = SegmentationAugmentation(ratio=(1, 1), max_class_ratio=None, hflip=0, photometric=False)
SIZES = [(24, 36), (24, 36), (30, 20), (50, 40)]  # height and width


def pair(index, size):
    """A picture whose left part is class 1 and dark, the right part class 2 and bright, with a row of no class."""
    height, width = size
    labels = np.full((height, width), 1, np.uint8)
    labels[:, width // 2 :] = 2
    labels[0] = 0
    pixels = np.repeat(labels[..., None] * 100 + index, 3, -1).astype(np.uint8)
    return Image.fromarray(pixels), Image.fromarray(labels)


def write(images, masks, count=4, extension="png"):
    images.mkdir(parents=True)
    masks.mkdir(parents=True)
    for index in range(count):
        picture, mask = pair(index, SIZES[index % 4])
        picture.save(images / f"{index}.{extension}")
        mask.save(masks / f"{index}.png")


LAYOUTS = {
    "ADE20K": ("images/training", "annotations/training", "images/validation", "annotations/validation"),
    "splits first": ("train/images", "train/masks", "val/images", "val/masks"),
    "MACU-Net": ("train/src", "train/lab", "val/src", "val/lab"),
    "CamVid": ("train", "trainannot", "val", "valannot"),
    "CamVid by names": ("train", "train_labels", "val", "val_labels"),
    "names of splits before": ("train_images", "train_masks", "valid_images", "valid_masks"),
    "mmsegmentation": ("img_dir/train", "ann_dir/train", "img_dir/val", "ann_dir/val"),
}


def of_config(name, source, **options):
    """The data of a part of a configuration, in a folder of tiny images."""
    path = CONFIGS / "base" / "data" / f"{name}.yaml"
    given = yaml.safe_load(path.read_text(encoding="utf-8"))["data"]["init_args"] | {"source": str(source)}
    made = SegmentationData(**given | {"img_size": 8, "augmentation": STILL, "num_workers": 0} | options)
    made.setup("fit")
    return made


@pytest.fixture
def folder(tmp_path):
    for images, masks in (LAYOUTS["ADE20K"][:2], LAYOUTS["ADE20K"][2:]):
        write(tmp_path / images, tmp_path / masks)
    return tmp_path


def data(source, **options):
    given = {"num_classes": 2, "reduce_zero_label": True, "img_size": 24, "batch_size": 4, "num_workers": 0}
    return SegmentationData(str(source), **{**given, "augmentation": STILL, "seed": 0, **options})


def refused(source, stage="fit", **options):
    with pytest.raises(UserError) as caught:
        data(source, **options).setup(stage)
    return str(caught.value)


class TestLayouts:
    @pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
    def test_folders(self, tmp_path, layout):
        write(tmp_path / layout[0], tmp_path / layout[1], 4)
        write(tmp_path / layout[2], tmp_path / layout[3], 3)
        splits = load_pairs(str(tmp_path))
        assert {name: len(rows) for name, rows in splits.items()} == {"train": 4, "val": 3}
        stored = splits["train"].cast_column("mask", datasets.Image(decode=False))[2]["mask"]
        assert stored["path"] == str(tmp_path / layout[1] / "2.png")

    def test_masks_with_a_suffix(self, tmp_path):
        write(tmp_path / "images" / "train", tmp_path / "masks" / "train", extension="jpg")
        for path in (tmp_path / "masks" / "train").iterdir():
            path.rename(path.with_name(f"{path.stem}_mask.png"))
        made = data(tmp_path, mask_suffix="_mask", val_fraction=0.5)
        made.setup("fit")
        assert len(made.train_set) == 2
        assert "--data.mask_suffix" in refused(tmp_path)

    def test_cityscapes_layout_and_its_ids(self, tmp_path):
        ids = Image.fromarray(np.array([[7, 8, 33], [0, 4, 31]], np.uint8))
        for split, city in (("train", "ulm"), ("train", "bonn"), ("val", "ulm")):
            name = f"{split}/{city}/{city}_000000_000019"
            save(picture(0, 3, 2), tmp_path / "leftImg8bit" / f"{name}_leftImg8bit.png")
            save(ids, tmp_path / "gtFine" / f"{name}_gtFine_labelIds.png")
            for other in ("color", "instanceIds"):
                save(picture(1, 3, 2), tmp_path / "gtFine" / f"{name}_gtFine_{other}.png")
        made = of_config("cityscapes", tmp_path)
        assert (len(made.train_set), len(made.val_set), made.num_classes) == (2, 1, 19)
        assert made.val_set[0]["mask"].tolist() == [[0, 1, 18], [255, 255, 16]]

    def test_pascal_voc_layout(self, tmp_path):
        for number in range(5):  # the last one is for detection alone
            save(picture(number), tmp_path / "JPEGImages" / f"2007_{number}.jpg")
        for number in range(4):
            mask = Image.fromarray(np.full((10, 12), [0, 15, 20, 255][number], np.uint8)).convert("P")
            save(mask, tmp_path / "SegmentationClass" / f"2007_{number}.png")
        lists = tmp_path / "ImageSets" / "Segmentation"
        lists.mkdir(parents=True)
        for name, numbers in (("train", (2, 0)), ("val", (1, 3)), ("trainval", range(4))):
            (lists / f"{name}.txt").write_text("".join(f"2007_{each}\n" for each in numbers), encoding="utf-8")
        made = of_config("voc", tmp_path, resize_limits=None)
        assert made.class_names[20] == "tvmonitor"
        assert [sample["id"][-10:] for sample in (made.train_set[0], made.train_set[1])] == ["2007_2.jpg", "2007_0.jpg"]
        assert [int(made.val_set[row]["mask"][0, 0]) for row in (0, 1)] == [15, 255]
        (lists / "val.txt").write_text("2007_9", encoding="utf-8")
        with pytest.raises(UserError, match=r"val\.txt' names images that .*JPEGImages' lacks: '2007_9'"):
            of_config("voc", tmp_path)

    @pytest.mark.parametrize(("list_name", "count"), [("default", 2), (None, 3)])
    def test_exports_in_the_layout_of_pascal_voc(self, tmp_path, list_name, count):
        """CVAT's list is called default, LabelMe's converter writes none; further folders are no classes."""
        write(tmp_path / "JPEGImages", tmp_path / "SegmentationClass", 3)
        shutil.copytree(tmp_path / "SegmentationClass", tmp_path / "SegmentationObject")
        if list_name:
            save(picture(), tmp_path / "ImageSets" / "Segmentation" / "x.png")
            (tmp_path / "ImageSets" / "Segmentation" / f"{list_name}.txt").write_text("0\n2\n")
        assert SegmentationData.recognises(str(tmp_path))
        assert len(load_pairs(str(tmp_path))["train"]) == count

    def test_names_that_do_not_agree(self, tmp_path):
        images, masks = tmp_path / "images", tmp_path / "masks"
        write(images, masks, 2)
        save(picture(), masks / "7.png")
        assert "Remove the masks without an image" in refused(tmp_path)
        for path in masks.iterdir():
            path.rename(path.with_name(f"{path.stem}_ids.png"))
        assert "end with '_ids': set --data.mask_suffix=_ids" in refused(tmp_path)
        for stem in ("0", "1"):
            shutil.copy(masks / f"{stem}_ids.png", masks / f"{stem}_color.png")
        assert "end with '_color', '_ids': choose the one that says the classes" in refused(tmp_path)
        shutil.rmtree(masks)
        save(picture(), masks / "maps" / "0.png")
        save(picture(), masks / "maps" / "1.png")
        assert "Masks and images of the same name are in different subfolders" in refused(tmp_path)
        shutil.rmtree(masks)
        masks.mkdir()
        assert f"there are no masks in '{masks}'" in refused(tmp_path)

    def test_tables(self, tmp_path):
        rows = {"image": [], "annotation": []}
        for index in range(8):
            for name, image in zip(rows, pair(index, SIZES[index % 4]), strict=True):
                rows[name].append({"bytes": png(image), "path": None})
        features = datasets.Features(dict.fromkeys(rows, datasets.Image()))
        datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "train.parquet")
        for streaming in (False, True):
            if streaming:
                shutil.copy(tmp_path / "train.parquet", tmp_path / "validation.parquet")
            made = data(tmp_path, streaming=streaming)
            made.setup("fit")
            assert made.mask_column == "annotation"
            batch = next(iter(made.train_dataloader()))
            assert batch["mask"].shape == (4, 24, 24)
            assert set(batch["mask"].unique().tolist()) <= {0, 1, 255}


class TestSamples:
    def test_training_batches(self, folder):
        made = data(folder, mean=[0] * 3, std=[1] * 3)
        made.setup("fit")
        batch = made.on_after_batch_transfer(next(iter(made.train_dataloader())), 0)
        assert batch["image"].shape == (4, 3, 24, 24)
        assert batch["mask"].shape == (4, 24, 24)
        inside = batch["mask"] != 255
        bright = (255 * batch["image"][:, 0]).round() >= 200
        assert torch.equal(bright[inside], batch["mask"][inside] == 1)
        assert inside.any()

    def test_evaluation_keeps_the_labels_size(self, folder):
        made = data(folder, resize_limits=(64, 16), multiple=8)
        made.setup("fit")
        batch = made.on_after_batch_transfer(next(iter(made.val_dataloader())), 0)
        assert [tuple(mask.shape) for mask in batch["mask"]] == SIZES
        assert [tuple(image.shape[1:]) for image in batch["image"]] == [(16, 24), (16, 24), (24, 16), (24, 16)]
        assert batch["size"] == SIZES
        assert all(image.dtype == torch.float32 for image in batch["image"])
        assert made.preview(4)["val"].shape == (4, 3, 24, 24)

    def test_images_of_one_size_are_one_tensor(self, folder):
        made = data(folder, batch_size=2)
        made.setup("validate")
        first, second = made.val_dataloader()
        assert first["image"].shape == (2, 3, 24, 36)
        assert isinstance(second["image"], list)

    def test_photos_elsewhere_are_predicted(self, folder, tmp_path):
        (tmp_path / "photos").mkdir()
        pair(1, (13, 31))[0].save(tmp_path / "photos" / "a.png")
        made = data(folder, predict_path=str(tmp_path / "photos"))
        made.setup("predict")
        (batch,) = made.predict_dataloader()
        assert batch["id"] == [str(tmp_path / "photos" / "a.png")]
        made.setup("validate")
        assert len(made.val_set) == 4

    def test_class_names(self, tmp_path, folder):
        assert data(folder, num_classes=None, class_names="ade20k").class_names[149] == "flag"
        (tmp_path / "names.txt").write_text("dark\nbright\n", encoding="utf-8")
        made = data(folder, num_classes=None, class_names=str(tmp_path / "names.txt"))
        assert (made.num_classes, made.class_names) == (2, ["dark", "bright"])
        with pytest.raises(UserError, match="150 names, but num_classes says 2"):
            _ = data(folder, class_names="ade20k").num_classes
        with pytest.raises(UserError, match="ade20k"):
            _ = data(folder, num_classes=None, class_names="no_file.txt").num_classes


class TestRefused:
    def test_a_mask_of_another_size(self, folder):
        Image.fromarray(np.ones((9, 9), np.uint8)).save(folder / "annotations/training/2.png")
        message = refused(folder)
        assert "annotations/training/2.png" in message
        assert "9 x 9 pixels, the image has 20 x 30" in message

    def test_a_photo_that_exif_turns_and_a_mask_that_it_does_not(self, folder):
        picture, _ = pair(2, SIZES[2])
        exif = Image.Exif()
        exif[0x0112] = 6
        picture.save(folder / "images/training/2.png", exif=exif)
        assert "--data.exif_orientation=false" in refused(folder)
        data(folder, exif_orientation=False).setup("fit")

    def test_labels_outside(self, folder):
        message = refused(folder, reduce_zero_label=False)
        assert "annotations/training/0.png" in message
        assert "values 2 are not classes (2 classes: 0 to 1; ignored: 255)" in message
        assert "--data.reduce_zero_label=true" in message

    def test_a_label_that_training_meets(self, folder):
        made = data(folder, bad_images="raise")
        made.setup("fit")
        Image.fromarray(np.full(SIZES[2], 7, np.uint8)).save(folder / "annotations/training/2.png")
        with pytest.raises(UserError, match=r"annotations/training/2.png.*values 7 are not classes"):
            list(made.train_dataloader())

    def test_a_bad_mask_is_skipped_as_a_bad_image_is(self, folder):
        made = data(folder)
        made.setup("fit")
        (folder / "annotations/training/2.png").write_bytes(b"no mask")
        batch = next(iter(made.train_dataloader()))
        assert len(batch["mask"]) == 4
        assert len(made.bad_images.named()) == 1

    def test_missing_pairs(self, folder):
        (folder / "annotations/training/2.png").unlink()
        (folder / "images/training/3.png").unlink()
        message = refused(folder)
        assert "1 of 3 images" in message
        assert "1 of 3 masks no image, such as '2', '3'" in message

    def test_jpeg_masks(self, folder):
        path = folder / "annotations/training/1.png"
        Image.open(path).save(path.with_suffix(".jpg"))
        path.unlink()
        assert "without loss" in refused(folder)

    def test_coloured_masks_without_their_colours(self, folder):
        for path in (folder / "annotations/training").iterdir():
            labels = np.array(Image.open(path))
            Image.fromarray(np.array([[0, 0, 0], [255, 0, 0], [0, 9, 255]], np.uint8)[labels]).save(path)
        assert "--data.mask_values" in refused(folder)
        shutil.rmtree(folder / "images/validation")
        given = {"mask_values": [[255, 0, 0], [0, 9, 255]], "ignored_values": [[0, 0, 0]], "val_fraction": 0.3}
        made = data(folder, reduce_zero_label=False, **given)
        made.setup("fit")
        assert len(made.val_set)

    def test_black_and_white_masks(self, folder):
        for path in folder.glob("annotations/*/*.png"):
            Image.fromarray((np.array(Image.open(path)) == 2).astype(np.uint8) * 255).save(path)
        assert "--data.mask_values=[0,255]" in refused(folder, reduce_zero_label=False)
        data(folder, reduce_zero_label=False, mask_values=[0, 255]).setup("fit")

    def test_a_class_without_a_pixel_is_warned_of(self, folder):
        with pytest.warns(UserWarning, match="4 of the 4 train masks .* no pixel is of the classes 'sea'"):
            data(folder, num_classes=None, class_names=["dark", "bright", "sea"]).setup("fit")

    def test_masks_without_a_class(self, folder):
        for path in folder.glob("annotations/validation/*.png"):
            Image.fromarray(np.zeros_like(np.array(Image.open(path)))).save(path)
        assert "no pixel of 4 val masks" in refused(folder)

    def test_hints_are_options_that_work(self, folder):
        """Each message is followed as it stands, until nothing is refused."""
        colours = np.array([[0, 0, 0], [255, 0, 0], [0, 9, 255]], np.uint8)
        for path in folder.glob("annotations/*/*.png"):
            Image.fromarray(colours[np.array(Image.open(path))]).save(path.with_stem(f"{path.stem}_L"))
            path.unlink()
        given, options = {"num_classes": None, "reduce_zero_label": False}, []
        for option in ("mask_suffix", "mask_values"):
            hint = re.search(r"--data\.(mask_suffix|mask_values)=(\S+)", refused(folder, **given))
            assert hint[1] == option
            given[hint[1]] = yaml.safe_load(hint[2])
            options.append(hint[0])
        made = data(folder, **given)
        made.setup("fit")
        assert made.num_classes == 3
        assert main(["check", str(folder), "--workers", "0", *options]) == 0

    @pytest.mark.parametrize(
        ("values", "hint"),
        [
            ([0, 1, 2], {"num_classes": 3}),
            ([0, 1, 255], {"num_classes": 2}),
            ([0, 255, 255], {"mask_values": [0, 255]}),
        ],
    )
    def test_values_of_masks_say_how_many_classes_there_may_be(self, folder, values, hint):
        for path in folder.glob("annotations/*/*.png"):
            Image.fromarray(np.array(values, np.uint8)[np.array(Image.open(path))]).save(path)
        ((option, value),) = hint.items()
        said = json.dumps(value, separators=(",", ":"))
        assert (
            f"--data.{option}={said}"
            in refused(folder, num_classes=None, reduce_zero_label=False).partition("; the")[2]
        )
        data(folder, **{"num_classes": None, "reduce_zero_label": False} | hint).setup("fit")

    def test_values_that_are_no_classes_have_two_ways_out(self, folder):
        message = refused(folder, num_classes=2, reduce_zero_label=False)
        assert "--data.ignored_values=[2]" in message
        assert "--data.num_classes=3" in message
        for given in ({"num_classes": 2, "ignored_values": [2]}, {"num_classes": 3}):
            data(folder, reduce_zero_label=False, **given).setup("fit")

    def test_masks_for_a_classification(self, folder):
        with pytest.raises(UserError, match="folders of images and masks"):
            ClassificationData(str(folder), num_workers=0).setup("fit")
        with pytest.raises(UserError, match="Name the folder of its images alone"):
            ClassificationData(str(folder), num_workers=0, labels=False).setup("fit")
        classes = ClassificationData(str(folder), num_workers=0, num_classes=2)
        classes.setup("fit")
        assert classes.class_names == ["annotations", "images"]


def test_data_check_reads_every_mask(folder, capsys):
    arguments = ["check", str(folder), "--workers=0", "--num_classes=3", "--reduce_zero_label"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "4 masks: 0 48.5%, 1 48.5%; ignored 3.0%" in out
    assert "1 classes have no pixel: '2'" in out
    Image.fromarray(np.full(SIZES[2], 7, np.uint8)).save(folder / "annotations/training/2.png")
    Image.fromarray(np.ones((9, 9), np.uint8)).save(folder / "annotations/validation/1.png")
    assert main([*arguments, f"--output={folder}/bad.csv"]) == 1
    assert "annotations/training/2.png: its values 7 are not classes" in capsys.readouterr().out
    assert "it has 9 x 9 pixels" in (folder / "bad.csv").read_text(encoding="utf-8")
