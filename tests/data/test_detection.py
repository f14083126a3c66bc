"""Detection data: what samples and batches are, their order, and what is refused."""

import csv
import itertools
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as v2

from linvit import UserError
from linvit.data import DetectionData
from linvit.data.loading.sampler import generator
from linvit.data.sources.scenes import Scenes
from linvit.data.transforms.detection import DetectionAugmentation, EvalTransform, TrainTransform, trainable
from linvit.io import coco_masks
from tests.data.coco import CATEGORIES, SIZES, annotation, annotations, write_coco, write_json
from tests.data.images import picture, save
from tests.golden_files import load
from tests.training import trainer

FEW = Scenes(train=6, val=3, test=2)


def scenes(**options):
    return DetectionData(**{"img_size": 64, "scenes": FEW, "batch_size": 3, "num_workers": 0, "seed": 0, **options})


def batch_of(data, loader):
    return data.on_after_batch_transfer(next(iter(loader)), 0)


class TestScenes:
    def test_training_batches(self):
        data = scenes(masks=True, resize_limits=(150, 96))
        data.setup("fit")
        batch = batch_of(data, data.train_dataloader())
        assert batch.keys() == {"image", "boxes", "labels", "masks", "index", "id", "size", "image_id"}
        assert batch["size"] == [(64, 64)] * 3
        for image, boxes, labels, masks in zip(*(batch[k] for k in ("image", "boxes", "labels", "masks")), strict=True):
            assert (image.shape, image.dtype) == ((3, 96, 96), torch.float32)
            assert (boxes.dtype, labels.dtype, masks.dtype) == (torch.float32, torch.int64, torch.uint8)
            assert (boxes.shape, masks.shape) == ((len(labels), 4), (len(labels), 96, 96))
            for box, mask in zip(boxes, masks, strict=True):
                y, x = mask.nonzero().T
                around = torch.stack([x.min(), y.min(), x.max() + 1, y.max() + 1])
                assert (box - around).abs().max() <= 1.5  # a pixel is half a pixel wider

    def test_evaluation_has_the_truth_at_the_original_size(self):
        data = scenes(masks=True, resize_limits=(150, 96))
        data.setup("validate")
        batch = batch_of(data, data.val_dataloader())
        assert batch["image"][0].shape == (3, 96, 96)
        assert batch["boxes"][0].dtype == torch.float64
        assert not batch["iscrowd"][0].any()
        assert batch["boxes"][0].max() <= 64
        assert coco_masks.decode(batch["rles"][0]).shape == (len(batch["labels"][0]), 64, 64)
        assert coco_masks.area(batch["rles"][0]).tolist() == batch["area"][0].tolist()

    def test_photos_are_predicted_where_the_source_is_gone(self, tmp_path):
        save(picture(0, 60, 40), tmp_path / "photo.png")
        data = coco(tmp_path / "gone", predict_path=str(tmp_path), resize_limits=(90, 60))
        data.setup("predict")
        batch = batch_of(data, data.predict_dataloader())
        assert (batch["size"], batch["image"][0].shape) == ([(40, 60)], (3, 60, 90))
        assert data.category_ids is None
        with pytest.raises(UserError, match="gone"):
            coco(tmp_path / "gone").category_ids  # noqa: B018

    def test_half_precision_leaves_boxes_and_truth_as_they_are(self, tmp_path):
        data = scenes()
        data.setup("fit")
        data.trainer = trainer(tmp_path, precision="bf16-true", logger=False)
        for loader in (data.train_dataloader(), data.val_dataloader()):
            moved = data.trainer.precision_plugin.convert_input(next(iter(loader)))
            exact = batch_of(data, loader) if "area" not in moved["not_transferred"].entries else None
            batch = data.on_after_batch_transfer(moved, 0)
            assert batch["image"][0].dtype == torch.bfloat16
            assert batch["boxes"][0].dtype in (torch.float32, torch.float64)
            assert exact is None or torch.equal(batch["boxes"][0], exact["boxes"][0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_coco(tmp_path_factory.mktemp("coco"))


def coco(source, **options):
    return DetectionData(str(source), **{"batch_size": 2, "num_workers": 0, "seed": 0, **options})


def loaded(source, **options):
    """Data whose tables are read."""
    data = coco(source, **options)
    assert data.num_classes
    return data


def refused(folder, stage="fit", found=None, content=None, **options):
    """What is said of a set with other annotations."""
    write_coco(folder, ("train",), found, **(content or {}))
    write_coco(folder, ("val",))
    with pytest.raises(UserError) as caught:
        coco(folder, **options).setup(stage)
    return str(caught.value)


class TestCoco:
    def test_labels_count_the_ids_in_order(self, folder, caplog):
        data = coco(folder)
        assert (data.class_names, data.category_ids, data.num_classes) == (["person", "dog", "bottle"], [1, 18, 44], 3)
        with caplog.at_level("INFO"):
            data.setup("fit")
        table = caplog.text[caplog.text.index("classes of") :].splitlines()
        assert [line.split() for line in table[1:5]] == [
            ["label", "id", "class", "train", "val"],
            ["0", "1", "person", "1", "1"],
            ["1", "18", "dog", "3", "3"],
            ["2", "44", "bottle", "2", "2"],
        ]

    def test_what_is_read_is_what_the_reference_reads(self, tmp_path):
        golden = load("dense_pipe_coco_parse")
        content = golden.meta["annotation"]
        (tmp_path / "train").mkdir()
        for image in content["images"]:
            save(picture(0, image["width"], image["height"]), tmp_path / "train" / image["file_name"])
        (tmp_path / "train.json").write_text(json.dumps(content), encoding="utf-8")
        names = golden.constructor["classes"]
        data = coco(tmp_path, class_names=names, val_fraction=0.01, masks=True)
        assert data.category_ids == golden.tensors["output.category_ids"].tolist()
        rows = data.splits["train"]
        trained = data.data_source.trained_rows(None)
        assert rows[trained]["image_id"] == golden.tensors["output.kept_image_ids"].tolist()
        assert rows["image_id"] == golden.tensors["output.test_image_ids"].tolist()
        reader = data.data_source.reader(data.targets("train"), lambda sample, seed: sample)
        table = reader.columns_of(rows)
        for row, image in enumerate(rows["image_id"]):
            if image not in (11, 30, 5):
                continue
            cells = {name: table[row][name][0].as_py() for name in table.column_names}
            objects = reader(cells, row, "", 0)["objects"]
            kept = trainable(objects, reader(cells, row, "", 0)["image"].shape[-2:])
            golden.check(f"output.boxes_{image}", torch.from_numpy(objects["boxes"][kept]).float())
            assert objects["labels"][kept].tolist() == golden.tensors[f"output.labels_{image}"].tolist()
            crowds = torch.from_numpy(objects["boxes"][objects["iscrowd"]]).float()
            golden.check(f"output.crowd_boxes_{image}", crowds)

    @pytest.mark.parametrize("flip", [False, True])
    def test_training_moves_boxes_and_masks_as_the_reference_does(self, flip):
        golden = load("dense_pipe_det_geometry")
        boxes, labels, masks = (golden.tensors[f"input.{name}"] for name in ("boxes", "labels", "masks"))
        objects = {"boxes": boxes.numpy(), "labels": labels.numpy(), "rles": coco_masks.encode(masks)}
        transform = TrainTransform((140, 90), DetectionAugmentation(hflip=float(flip)), masks=True)
        made = transform({"image": torch.zeros(3, 75, 100, dtype=torch.uint8), "objects": objects}, 0)
        name = "resize_flip" if flip else "resize"
        golden.check(f"output.{name}_boxes", made["boxes"])
        assert torch.equal(made["labels"], golden.tensors[f"output.{name}_labels"])
        assert torch.equal(made["masks"], golden.tensors[f"output.{name}_masks"])
        assert (made["size"], made["image"].shape[1:]) == ((75, 100), (90, 120))

    def test_images_have_the_size_of_the_reference(self):
        tensors = load("dense_pipe_shapes").tensors
        train = TrainTransform((1333, 800), DetectionAugmentation(hflip=0), masks=False)
        for given, expected in zip(
            tensors["input.image_hw"].tolist(), tensors["output.coco_test"].tolist(), strict=True
        ):
            assert EvalTransform((1333, 800), masks=False).resize.sizes(*given)[0] == tuple(expected)
            assert [list(op.keywords["size"]) for op in train._ops(generator(0), tuple(given))] == [expected]

    def test_multi_scale_training_draws_its_sizes_from_the_recipe(self):
        sides, crops = (480, 512, 800), (400, 500, 600)
        transform = TrainTransform((1333, 800), DetectionAugmentation(0.5, sides, crops), masks=False)
        drawn = [transform._ops(generator(seed), (480, 640)) for seed in range(400)]
        size_of = lambda op: op.keywords["size"]  # noqa: E731
        assert {min(size_of(ops[-1])) for ops in drawn} == set(sides)
        cropped = [ops for ops in drawn if len(ops) > 2]
        assert 160 < len(cropped) < 240
        assert {min(size_of(ops[-3])) for ops in cropped} == set(crops)
        sizes = [ops[-2].keywords["box"][2:] for ops in cropped]
        assert min(map(min, sizes)) >= 384
        assert 590 < max(map(max, sizes)) <= 600
        assert all(height <= size_of(ops[-3])[0] for ops, (height, _) in zip(cropped, sizes, strict=True))
        assert 160 < sum(ops[0] is v2.horizontal_flip for ops in drawn) < 240
        assert max(max(size_of(ops[-1])) for ops in drawn) <= 1333

    def test_all_boxes_may_be_cropped_away(self):
        tiny = {"boxes": np.array([[0, 0, 2, 2.0]]), "labels": np.array([1])}
        tiny["rles"] = coco_masks.encode(np.pad(np.ones((1, 2, 2)), ((0, 0), (0, 98), (0, 98))))
        given = DetectionAugmentation(0, (50,), (100,), (10, 20))
        made = [
            TrainTransform((100, 100), given, True)({"image": torch.zeros(3, 100, 100), "objects": tiny}, seed)
            for seed in range(20)
        ]
        empty = [sample for sample in made if not len(sample["boxes"])]
        assert empty
        assert {(s["boxes"].shape, s["labels"].shape, s["masks"].shape[0]) for s in empty} == {((0, 4), (0,), 0)}

    def test_crowds_and_empty_images(self, tmp_path):
        crowd = annotation(
            1, 5, 18, (1, 1, 9, 9), iscrowd=1, segmentation={"size": [48, 64], "counts": [100, 50, 2922]}
        )
        write_coco(tmp_path, found=[crowd, *annotations()[2:], annotation(2, 5, 44)])
        data = coco(tmp_path, masks=True)
        data.setup("fit")
        data.setup("predict")
        assert batch_of(data, data.predict_dataloader())["image_id"] == [5, 2]
        assert len(data.train_set) == 3  # 30 has no objects
        labels = {sample["image_id"]: sample["labels"].tolist() for sample in data.train_set}
        assert labels[5] == [2]
        batch = [data.on_after_batch_transfer(batch, 0) for batch in data.val_dataloader()]
        assert batch[0]["iscrowd"][0].tolist() == [True, False]
        assert batch[0]["area"][0].tolist() == [81, 200]  # as the file says, not as the mask has it
        assert coco_masks.area(batch[0]["rles"][0])[0] == 50
        assert (batch[1]["boxes"][1].shape, batch[1]["rles"][1]) == ((0, 4), [])

    @pytest.mark.parametrize(
        "layout",
        [
            {"train.json": "train", "val.json": "val"},
            {"annotations/train.json": "images/train", "annotations/val.json": "images/val"},
            {"train/_annotations.coco.json": "train", "valid/_annotations.coco.json": "valid"},
            {"annotations/instances_train2014.json": "images", "annotations/instances_val2014.json": "images"},
            {"annotations/instances_default.json": "images"},
        ],
        ids=str,
    )
    def test_layouts(self, tmp_path, layout):
        for file, images in layout.items():
            write_json(tmp_path / file)
            for key, (height, width) in SIZES.items():
                save(picture(key, width, height), tmp_path / images / f"{key}.png")
        data = coco(tmp_path, val_fraction=0.25)
        data.setup("fit")
        assert len(data.val_set) == (4 if len(layout) == 2 else 1)

    def test_annotations_may_stand_before_their_images(self, folder, tmp_path):
        content = json.loads((folder / "annotations" / "instances_train2017.json").read_text(encoding="utf-8"))
        reordered = {name: content[name] for name in ("annotations", "categories", "images")}
        (tmp_path / "train.json").write_text(json.dumps(reordered, indent=1), encoding="utf-8")
        (tmp_path / "train").symlink_to(folder / "train2017")
        data = coco(tmp_path, masks=True)
        assert data.splits["train"][:]["objects"] == coco(folder, masks=True).splits["train"][:]["objects"]

    def test_a_subset_of_the_classes(self, folder):
        data = coco(folder, class_names=["bottle", "dog"])
        assert (data.class_names, data.category_ids) == (["dog", "bottle"], [18, 44])
        data.setup("fit")
        assert {label for sample in data.train_set for label in sample["labels"].tolist()} == {0, 1}
        with pytest.raises(UserError, match=r"has no class 'dogs'.*Did you mean 'dog'"):
            loaded(folder, class_names=["dogs"])


class TestLoading:
    """Multi-scale training in batches by aspect."""

    def epochs(self, folder, state=None, batches=None, **options):
        """What batches of epoch 1 hold, and the state of the loader behind them."""
        given = DetectionAugmentation(0.5, (40, 50, 60), (50, 70), (20, 40))
        data = coco(folder, masks=True, resize_limits=(100, 60), augmentation=given, **options)
        data.setup("fit")
        loader = data.train_dataloader()
        if state is not None:
            loader.load_state_dict(state)
        loader.sampler.set_epoch(1)
        left = len(loader) - loader.batches_done
        found = list(itertools.islice(loader, left if batches is None else batches))
        return [batch | vars(batch.pop("not_transferred"))["entries"] for batch in found], loader.state_dict()

    def same(self, found, expected):
        assert len(found) == len(expected)
        for batch, other in zip(found, expected, strict=True):
            assert batch.pop("id") == other["id"]
            torch.testing.assert_close(batch, {name: other[name] for name in batch}, rtol=0, atol=0)

    def test_the_number_of_loader_processes_changes_nothing(self, tmp_path):
        sizes = {key: (40 + key % 3 * 10, 50) for key in range(12)}
        write_coco(tmp_path, found=[annotation(key, key, 18) for key in sizes], sizes=sizes)
        whole, _ = self.epochs(tmp_path)
        assert len(whole) == 6
        wide = [{width > height for height, width in batch["size"]} for batch in whole]
        assert sum(len(kinds) > 1 for kinds in wide) <= 1
        self.same(self.epochs(tmp_path, num_workers=2)[0], whole)
        first, state = self.epochs(tmp_path, batches=2)
        rest, _ = self.epochs(tmp_path, state, num_workers=2)
        self.same([*first, *rest], whole)


class TestRefused:
    """Each message names the annotation, or the file, before training."""

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            ([annotation(7, 6)], "1 of the 7 .* an image_id that no image has, such as annotation 7: 6"),
            ([annotation(7, 5), annotation(7, 2)], "1 of the 8 .* an id that another annotation has, .* 7 of .*2.png"),
            ([annotation(7, 5, 99)], "a category that is not among the classes, such as annotation 7 of .*5.png: 99"),
            ([annotation(7, 5) | {"bbox": [1, 2, float("nan"), 4]}], "annotation 7 of .*5.png: .1, 2, nan, 4"),
            ([annotation(7, 5) | {"bbox": [1, 2, 3]}], "a field bbox that is not four finite numbers"),
            ([annotation(7, 5) | {"bbox": [1, 2, 3, 10**400]}], "a field bbox that is not four finite numbers"),
            ([annotation(7, 5) | {"bbox": [1, 2, 3, 1e30]}], "a box that .* far outside of its image"),
            ([{"id": 7, "image_id": 5, "category_id": 1}], "not four finite numbers, .* 7 of .*5.png: None"),
            (
                [annotation(7, 5) | {"id": "a"}],
                "field id that is not a whole number, .* annotation 'a' of .*5.png: 'a'",
            ),
            (
                [annotation(7, 5, "1")],
                "field category_id that is not a whole number, .* 7 of .*5.png: '1'",
            ),
            ([annotation(7, 5, area="9")], "a field area that is not a finite number"),
            (["7"], "an entry that is not an object of JSON"),
            ([annotation(7, 5, segmentation=[[1, 2, 3, 4, 5, 6, 7]])], "annotation 7 .* got 7 coordinates"),
            ([annotation(7, 5, segmentation=[[1, 2, 3e9, 4, 5, 6]])], "annotation 7 .* far outside of its image"),
            ([annotation(7, 5, segmentation=[])], "an empty segmentation.*annotation 7.*--model.head=faster_rcnn"),
            ([annotation(7, 5, segmentation={"size": [9, 9], "counts": [81]})], "annotation 7 .* its image .48, 64."),
            ([annotation(7, 5, segmentation={"size": [48, 64], "counts": "abc"})], "annotation 7 .* no.* run-length"),
        ],
    )
    def test_annotations(self, tmp_path, wrong, message):
        said = refused(tmp_path, found=[*annotations(), *wrong], masks=True)
        assert re.search(message, said), said
        assert "--data.skip_bad_annotations=true" in said
        data = coco(tmp_path, masks=True, skip_bad_annotations=True)
        with pytest.warns(UserWarning, match="malformed: .* They are left out"):
            data.setup("fit")
        good = [sample["labels"].tolist() for sample in data.train_set]
        assert sum(map(len, good)) == 6 + len(wrong) - 1

    def test_bad_annotations_are_skipped_up_to_a_fraction_and_listed(self, tmp_path):
        """Label Studio writes empty segmentations."""
        empty = [annotation(100 + i, 5, segmentation=[]) for i in range(7)]
        write_coco(tmp_path, found=[*annotations(), *empty, annotation(7, 5, 99)])
        with pytest.raises(UserError, match=r"8 of the 14 .*7 with an empty .*1 with a cat.*_fraction=0.572"):
            coco(tmp_path, masks=True, skip_bad_annotations=True).setup("fit")
        data = coco(tmp_path, masks=True, skip_bad_annotations=True, max_bad_fraction=0.572)
        task = SimpleNamespace(hparams={"num_classes": 3})
        given = {"log_dir": str(tmp_path), "lightning_module": task, "global_rank": 0, "world_size": 1}
        data.trainer = SimpleNamespace(**given, loggers=[])
        data.setup("fit")
        assert not (tmp_path / "bad_annotations.csv").exists()  # the folder is that of all runs
        data.trainer.loggers = ["one"]
        data.setup("fit")
        with open(f"{tmp_path}/bad_annotations.csv", newline="", encoding="utf-8") as file:
            rows = [*csv.reader(file)]
        assert [row[0] for row in rows] == ["split", *8 * ["train"], *8 * ["val"]]
        assert rows[1][1:] == [f"annotation 100 of {tmp_path / 'train2017' / '5.png'}", "an empty segmentation", ""]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ({"categories": [*CATEGORIES, {"id": 1, "name": "x"}]}, "2 entries of categories .* have the id 1"),
            ({"categories": [*CATEGORIES, {"id": 2, "name": "dog"}]}, "the name dog"),
            ({"categories": [{"id": 1, "name": "dog"}, {"id": 18, "name": "person"}]}, "category 1 is 'person' in"),
            ({"images": []}, "has no images"),
            (
                {"images": [{"id": 5, "file_name": "5.png"}]},
                "one of the images in .* has a field height that is not a whole number: None",
            ),
            (
                {"images": [{"id": 5, "file_name": "5.png", "height": 0, "width": 3}]},
                "'5.png'.* a size that cannot be: 3 x 0",
            ),
            ({"images": [{"id": 5, "file_name": "5.png", "height": 10**9, "width": 10**9}]}, "cannot be: 1000000000 x"),
            (
                {"images": [{"id": 10**30, "file_name": "5.png", "height": 1, "width": 1}]},
                "field id that is not a whole",
            ),
            ({"images": ["5.png"]}, "images in .* an entry that is not an object of JSON: '5.png'"),
            (
                {"categories": [{"id": "1", "name": "dog"}]},
                "categories in .* a field id that is not a whole number: '1'",
            ),
        ],
    )
    def test_images_and_categories(self, tmp_path, content, message):
        said = refused(tmp_path, content=content)
        assert re.search(message, said), said

    def test_missing_files(self, tmp_path):
        write_coco(tmp_path)
        (tmp_path / "train2017" / "9.png").unlink()
        with pytest.raises(UserError, match=r"1 of the 4 images of .*train2017.json' are not in .*: '9.png'. Add them"):
            loaded(tmp_path)
        for path in (tmp_path / "train2017").iterdir():
            path.unlink()
        with pytest.raises(UserError, match=r"4 of the 4 .* any of the folders .*: '5.png'.* link their folder there"):
            loaded(tmp_path)

    def test_the_first_image_does_not_decide_where_the_others_lie(self, tmp_path):
        write_coco(tmp_path)
        (tmp_path / "train2017" / "5.png").rename(tmp_path / "5.png")
        with pytest.raises(UserError, match=r"1 of the 4 images of .* are not in '.*train2017': '5.png'"):
            loaded(tmp_path)

    @pytest.mark.parametrize("text", ["[]", '{"images": [{}', "nonsense", "[" * 10**5, "1" * 6000])
    def test_what_is_no_annotation_file(self, tmp_path, text):
        write_coco(tmp_path)
        (tmp_path / "annotations" / "instances_train2017.json").write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=r"instances_train2017.json"):
            loaded(tmp_path)

    def test_boxes_in_another_format(self, tmp_path):
        two_corners = [one | {"bbox": [30, 20, 44, 40]} for one in annotations()]
        assert "are they xyxy (--data.box_format=xyxy)" in refused(tmp_path, found=two_corners)
        fractions = [one | {"bbox": [0.1, 0.2, 0.3, 0.4]} for one in annotations()]
        assert "not in fractions of the image" in refused(tmp_path, found=fractions)
        write_coco(tmp_path, found=two_corners)
        data = coco(tmp_path, box_format="xyxy")
        data.setup("fit")
        assert data.train_set[0]["boxes"][0].tolist() == [30, 20, 44, 40]

    def test_an_image_of_another_size_than_its_annotations_is_bad(self, tmp_path):
        write_coco(tmp_path)
        save(picture(5, 20, 30), tmp_path / "train2017" / "5.png")
        data = coco(tmp_path, bad_images="raise")
        data.setup("fit")
        with pytest.raises(UserError, match=r"5.png .*annotations are for 64 x 48 pixels, the image has 20 x 30"):
            list(data.train_set)

    def test_streams(self, tmp_path):
        with pytest.raises(UserError, match=r"--data.streaming=false"):
            coco(tmp_path, streaming=True)


def test_an_image_of_one_pixel(tmp_path, monkeypatch):
    write_coco(tmp_path, found=[annotation(1, 1, bbox=(0, 0, 1, 1))], sizes={1: (1, 1)}, categories=CATEGORIES[1:2])
    with pytest.raises(UserError, match=r"all 1 training images .* too small"):
        coco(tmp_path).setup("fit")
    monkeypatch.setattr("linvit.data.sources.object_audit.MIN_SIDE", 0)
    data = coco(tmp_path, masks=True, resize_limits=(90, 60), batch_size=1)
    data.setup("fit")
    batch = batch_of(data, data.train_dataloader())
    assert batch["boxes"][0].tolist() == [[0, 0, 60, 60]]
