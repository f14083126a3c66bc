"""Base class of all heads of object detection."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torchvision.ops import clip_boxes_to_image

from linvit.attention.ops.functional import is_exporting
from linvit.errors import UserError
from linvit.heads.base import Head

Size = tuple[int, int]
"""Height and width."""
Target = Mapping[str, Tensor]
"""Targets of one image: `boxes` (n, 4), `labels` (n,) and, if the head needs them, `masks` (n, h, w)."""
Detections = dict[str, Tensor]
"""Detections in one image: `boxes` (n, 4), `labels` (n,), `scores` (n,) and, for mask heads, `masks` (n, H, W)."""


def constants(values: Sequence[float], like: Tensor) -> Tensor:
    """Returns numbers (n,) with a tensor's dtype and device; unlike `new_tensor`, without synchronising the host."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


def positions(masks: Sequence[Tensor]) -> list[Tensor]:
    """Returns the positions where each of the masks (n_i,) is true, in order; one synchronisation for all of them."""
    if is_exporting():
        return [mask.nonzero()[:, 0] for mask in masks]
    counts = torch.stack([mask.count_nonzero() for mask in masks]).tolist()
    return [mask.nonzero_static(size=count)[:, 0] for mask, count in zip(masks, counts, strict=True)]


class ImageShape(NamedTuple):
    """Sizes (height, width) of one image of a batch."""

    size: Size  # network input without padding; boxes of targets are in its pixels
    padded: Size  # the same after padding on its own, before padding to the size of the batch
    original: Size  # image for which detections are returned

    def clip(self, boxes: Tensor) -> Tensor:
        """Returns boxes (..., 4) clipped to the network's input image; NaN becomes 0.

        So a diverging network has a NaN loss, and operators on boxes need not handle NaN.
        """
        return clip_boxes_to_image(boxes.nan_to_num(0.0), self.size)  # type: ignore[no-any-return]

    def to_original(self, boxes: Tensor) -> Tensor:
        """Returns boxes (..., 4) of the network's input image in pixels of the original image, clipped to it."""
        if self.original == self.size:
            return self.clip(boxes)
        return clip_boxes_to_image(boxes / self._scale(boxes), self.original)  # type: ignore[no-any-return]

    def from_original(self, boxes: Tensor) -> Tensor:
        """Returns boxes (..., 4) of the original image in pixels of the network's input image."""
        return boxes if self.original == self.size else boxes * self._scale(boxes)

    def _scale(self, boxes: Tensor) -> Tensor:
        width, height = (self.size[i] / self.original[i] for i in (1, 0))
        return constants([width, height, width, height], boxes)


class ImageShapes(NamedTuple):
    """Sizes of B images, for boxes (B, ..., 4); `ImageShape` is for boxes of images of one size."""

    images: Sequence[ImageShape]

    def clip(self, boxes: Tensor) -> Tensor:
        """Returns boxes clipped to the network's input images."""
        return torch.stack([image.clip(own) for image, own in zip(self.images, boxes, strict=True)])

    def to_original(self, boxes: Tensor) -> Tensor:
        """Returns boxes in pixels of the original images."""
        return torch.stack([image.to_original(own) for image, own in zip(self.images, boxes, strict=True)])

    def from_original(self, boxes: Tensor) -> Tensor:
        """Returns boxes in pixels of the network's input images."""
        return torch.stack([image.from_original(own) for image, own in zip(self.images, boxes, strict=True)])


class DetectionHead(Head):
    """Maps the feature maps of a backbone to losses or detections, by torchvision's conventions.

    A subclass defines a constructor that takes `channels`, `reductions` and `num_classes` and calls this one, and the
    methods `losses` and `detect_batch`, or, if it need not be exported, `detect`; options are keyword arguments with
    defaults. Classes are 0 to K - 1, without one for the background. Boxes are x1, y1, x2, y2 in pixels, from the left
    and the top edge of the image; x2 - x1 is the width. Their arithmetic is in float32 or more, also under autocast.

    Args of the heads' constructors:
        score_threshold: Detections have a score above this.
        nms_threshold: Of detections of one class with an intersection over union above this, only the best is kept.
        max_detections: Maximum number of detections per image.

    Attributes:
        with_masks: True if the head predicts masks; targets then need `masks`.
    """

    task = "detection"
    maker = "create_detector"
    keeps_classifiers = True  # zeros would mean scores of 0.5 for every anchor
    with_masks: ClassVar[bool] = False

    def forward(
        self, features: Sequence[Tensor], images: Sequence[ImageShape], targets: Sequence[Target] | None = None
    ) -> dict[str, Tensor] | list[Detections]:
        """Returns the losses if there are targets, else the detections of each image.

        Args:
            features: Feature maps (B, C_i, H_i, W_i), the finest first.
            images: The sizes of the B images.
            targets: Targets of each image; every box has an area inside its image.
        """
        return self.detect(features, images) if targets is None else self.losses(features, images, targets)

    def losses(
        self, features: Sequence[Tensor], images: Sequence[ImageShape], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        """Returns scalar losses by name, whose sum is trained; each depends on the features, if only by a factor 0."""
        raise NotImplementedError(f"{type(self).__name__} has no losses")

    def detect(self, features: Sequence[Tensor], images: Sequence[ImageShape]) -> list[Detections]:
        """Returns the detections of each image in pixels of its original size, the best first."""
        found = self.detect_batch(features, ImageShapes(images))
        counts = found.pop("num_detections").tolist()
        return [{name: of_batch[i, :count] for name, of_batch in found.items()} for i, count in enumerate(counts)]

    def detect_batch(self, features: Sequence[Tensor], image: ImageShape | ImageShapes) -> dict[str, Tensor]:
        """Returns the detections of images, in tensors of fixed sizes if they have one size.

        They are `num_detections` (B,) and, padded with zeros, `boxes` (B, n, 4), `labels` (B, n), `scores`
        (B, n), the best first, and for mask heads `masks` (B, n, h, w), the probabilities of each box's pixels; n is
        `max_detections` in exported programs, otherwise the largest number of detections of an image.
        """
        raise UserError(f"a detector with {type(self).__name__} cannot be exported: the head has no detect_batch")
