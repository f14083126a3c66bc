"""Images with objects, each with a box, a class and perhaps a mask: embedded, from COCO's files, tables or the hub."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from linvit.data.base import ImageData
from linvit.data.sources.images import Target
from linvit.data.sources.scene_source import SceneSource
from linvit.data.sources.scenes import CLASSES, Scenes
from linvit.data.sources.splits import SCENES as DIGIT_SCENES
from linvit.data.transforms.detection import DetectionAugmentation, EvalTransform, TrainTransform
from linvit.errors import UserError


class DetectionData(ImageData):
    """Images with objects: boxes x1, y1, x2, y2 in pixels, classes 0 to K - 1, and masks if they are asked for.

    Batches hold lists. In training: `image` (3, h, w), normalised, of several sizes; of each image there `boxes`
    (n, 4), `labels` (n,) and with `masks` 8-bit masks (n, h, w), without crowds and boxes without area; n may be 0. In
    evaluation: `image`, and the truth at the original size, crowds included, on the CPU: `boxes` in float64, `labels`,
    `iscrowd`, `area` as COCO counts it, and `rles`, COCO's run-length encoded masks or None. In both: `index`, `id`
    (the path), `size`, the original (H, W), and `image_id`, COCO's number of the image.

    Args:
        source: "digit_scenes", scenes of the size `img_size` made of real handwritten digits. See `ImageData`.
        img_size: Side, or [H, W], for which the model's tables of positions are made, and size of the scenes.
        masks: Whether objects have masks, as instance segmentation needs them.
        limits: Longest long side and longest short side of a resized image, which keeps its aspect, such as COCO's
            [1333, 800]; null leaves the size.
        augmentation: Random changes to training images.
        scenes: What `digit_scenes` is like.
        **data: Arguments of `ImageData`: batches, splits, bad images.

    Example:
        $ linvit fit --config detection_quickstart --data.source=path/to/coco
    """

    train_transform: TrainTransform
    eval_transform: EvalTransform
    ragged: ClassVar[tuple[str, ...]] = ("image", "masks", "size", "image_id")
    held: ClassVar[tuple[str, ...]] = ("boxes", "labels", "iscrowd", "area", "rles")

    def __init__(
        self,
        source: str = DIGIT_SCENES,
        img_size: int | Sequence[int] = 224,
        masks: bool = False,
        limits: tuple[int, int] | None = None,
        augmentation: DetectionAugmentation = DetectionAugmentation(),  # noqa: B008 (frozen)
        scenes: Scenes = Scenes(),  # noqa: B008
        **data: Any,
    ) -> None:
        super().__init__(source, img_size=img_size, **data)
        if limits is not None and not limits[0] >= limits[1] > 0:
            raise UserError(f"limits must be [longer side, shorter side] in pixels, above 0; got {list(limits)}")
        self.masks = masks
        self.limits = limits
        self.train_transform = TrainTransform(limits, augmentation, masks)
        self.eval_transform = EvalTransform(limits, masks)
        if source != DIGIT_SCENES:
            raise UserError(f"source must be {DIGIT_SCENES}; got '{source}'")
        self.data_source = SceneSource(scenes, self.size)

    @property
    def class_names(self) -> list[str]:
        """Names of the classes in the order of their labels."""
        return CLASSES[1:]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def category_ids(self) -> list[int]:
        """What the data calls the classes, in the order of their labels: COCO's category ids."""
        return list(range(10))

    def targets(self, split: str) -> Mapping[str, Target]:
        """The objects of a split."""
        return {name: Target("scene", _as_it_is) for name in ("objects", "image_id")}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalises the images, and moves boxes and labels of training to their device."""
        batch = super().on_after_batch_transfer(batch, dataloader_idx)
        if not isinstance(batch, dict):
            return batch
        held = batch.pop("held").entries
        if "area" not in held:  # of training
            held = {name: _moved(tensors, batch["image"][0].device) for name, tensors in held.items()}
        return batch | held


def _as_it_is(cell: Any, name: str) -> Any:
    return cell


def _moved(tensors: list[Tensor], device: Any) -> list[Tensor]:
    """Tensors on a device, by one copy of all of them."""
    return list(torch.cat(tensors).to(device, non_blocking=True).split([len(tensor) for tensor in tensors]))
