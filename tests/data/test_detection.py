"""Detection data: what samples and batches are, their order, and what is refused."""

import pytest
import torch

from linvit import coco_masks
from linvit.data import DetectionData
from linvit.data.sources.scenes import Scenes
from tests.training import trainer

FEW = Scenes(train=6, val=3, test=2)


def scenes(**options):
    return DetectionData(**{"img_size": 64, "scenes": FEW, "batch_size": 3, "num_workers": 0, "seed": 0, **options})


def batch_of(data, loader):
    return data.on_after_batch_transfer(next(iter(loader)), 0)


class TestScenes:
    def test_training_batches(self):
        data = scenes(masks=True, limits=(150, 96))
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

    @pytest.mark.parametrize("masks", [True, False])
    def test_evaluation_has_the_truth_at_the_original_size(self, masks):
        data = scenes(masks=masks, limits=(150, 96))
        data.setup("validate")
        batch = batch_of(data, data.val_dataloader())
        assert batch["image"][0].shape == (3, 96, 96)
        assert batch["boxes"][0].dtype == torch.float64
        assert not batch["iscrowd"][0].any()
        assert batch["boxes"][0].max() <= 64
        if masks:
            assert coco_masks.decode(batch["rles"][0]).shape == (len(batch["labels"][0]), 64, 64)
            assert coco_masks.area(batch["rles"][0]).tolist() == batch["area"][0].tolist()
        else:
            assert batch["rles"] == [None] * 3

    def test_images_alone_are_predicted(self):
        data = scenes()
        data.setup("predict")
        assert batch_of(data, data.predict_dataloader()).keys() == {"image", "size", "index", "id"}

    def test_half_precision_leaves_boxes_and_truth_as_they_are(self, tmp_path):
        data = scenes()
        data.trainer = trainer(tmp_path, precision="bf16-true", logger=False)
        data.setup("fit")
        for loader in (data.train_dataloader(), data.val_dataloader()):
            moved = data.trainer.precision_plugin.convert_input(next(iter(loader)))
            exact = batch_of(data, loader) if "area" not in moved["held"].entries else None
            batch = data.on_after_batch_transfer(moved, 0)
            assert batch["image"][0].dtype == torch.bfloat16
            assert batch["boxes"][0].dtype in (torch.float32, torch.float64)
            assert exact is None or torch.equal(batch["boxes"][0], exact["boxes"][0])
