"""The contract that every head of object detection meets."""

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
"""The truth of one image: `boxes` (n, 4), `labels` (n,) and, where the head wants them, `masks` (n, h, w)."""
Detections = dict[str, Tensor]
"""What was found in one image: `boxes` (n, 4), `labels` (n,), `scores` (n,) and, of mask heads, `masks` (n, H, W)."""


def constants(values: Sequence[float], like: Tensor) -> Tensor:
    """Returns numbers (n,) with the dtype and on the device of a tensor; unlike `new_tensor`, without a wait."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


def positions(masks: Sequence[Tensor]) -> list[Tensor]:
    """Returns where each of the masks (n_i,) is true, in their order; the host waits once for all of them."""
    if is_exporting():
        return [mask.nonzero()[:, 0] for mask in masks]
    counts = torch.stack([mask.count_nonzero() for mask in masks]).tolist()
    return [mask.nonzero_static(size=count)[:, 0] for mask, count in zip(masks, counts, strict=True)]


class ImageShape(NamedTuple):
    """The sizes (height, width) of one image of a batch."""

    size: Size  # of the image that the network is given, without padding; boxes of targets are in its pixels
    padded: Size  # of the same after padding on its own, before the padding to the size of the batch
    original: Size  # of the image that detections are for

    def clip(self, boxes: Tensor) -> Tensor:
        """Returns boxes (..., 4) moved into the image that the network is given; what is NaN becomes 0.

        So a network that diverges has a loss that is NaN, and operators on boxes need not know.
        """
        return clip_boxes_to_image(boxes.nan_to_num(0.0), self.size)  # type: ignore[no-any-return]

    def to_original(self, boxes: Tensor) -> Tensor:
        """Returns boxes (..., 4) of the image that the network is given in pixels of the original one, inside it."""
        if self.original == self.size:
            return self.clip(boxes)
        return clip_boxes_to_image(boxes / self._scale(boxes), self.original)  # type: ignore[no-any-return]

    def from_original(self, boxes: Tensor) -> Tensor:
        """Returns boxes (..., 4) of the original image in pixels of the one that the network is given."""
        return boxes if self.original == self.size else boxes * self._scale(boxes)

    def _scale(self, boxes: Tensor) -> Tensor:
        width, height = (self.size[i] / self.original[i] for i in (1, 0))
        return constants([width, height, width, height], boxes)


class ImageShapes(NamedTuple):
    """The sizes of B images, for boxes (B, ..., 4), as an `ImageShape` is for boxes of any images of one size."""

    images: Sequence[ImageShape]

    def clip(self, boxes: Tensor) -> Tensor:
        """Returns boxes moved into the images that the network is given."""
        return torch.stack([image.clip(own) for image, own in zip(self.images, boxes, strict=True)])

    def to_original(self, boxes: Tensor) -> Tensor:
        """Returns boxes in pixels of the original images."""
        return torch.stack([image.to_original(own) for image, own in zip(self.images, boxes, strict=True)])

    def from_original(self, boxes: Tensor) -> Tensor:
        """Returns boxes in pixels of the images that the network is given."""
        return torch.stack([image.from_original(own) for image, own in zip(self.images, boxes, strict=True)])


class DetectionHead(Head):
    """Turns the feature maps of a backbone into losses or detections; torchvision's convention.

    A subclass writes a constructor that takes `channels`, `reductions` and `num_classes` and calls this one, and the
    methods `losses` and `detect_batch`, or, if it is not to be exported, `detect`; options are keyword arguments with
    defaults. Classes are 0 to K - 1, without one for the background. Boxes are x1, y1, x2, y2 in pixels, from the left
    and the top edge of the image; x2 - x1 is the width. Their arithmetic is in float32 or more, also under autocast.

    Args of the heads' constructors:
        score_threshold: Detections have a score above this.
        nms_threshold: Of detections of one class with an intersection over union above this, the best stays.
        max_detections: The most detections of an image.

    Attributes:
        with_masks: Whether it predicts masks, for which targets need `masks`.
    """

    task = "detection"
    maker = "create_detector"
    keeps_classifiers = True  # zeros would be scores of 0.5 for every anchor
    with_masks: ClassVar[bool] = False

    def forward(
        self, features: Sequence[Tensor], images: Sequence[ImageShape], targets: Sequence[Target] | None = None
    ) -> dict[str, Tensor] | list[Detections]:
        """Returns the losses if there are targets, else the detections of each image.

        Args:
            features: Feature maps (B, C_i, H_i, W_i), the finest first.
            images: The sizes of the B images.
            targets: The truth of each; every box has an area inside its image.
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
        """Returns the detections of images of one size, in tensors of fixed sizes, or of several sizes.

        They are `num_detections` (B,) and, with zeros behind so many, `boxes` (B, n, 4), `labels` (B, n), `scores`
        (B, n), the best first, and of mask heads `masks` (B, n, h, w), the probabilities of each box's pixels; n is
        `max_detections`, or outside of exported programs what the image with the most has.
        """
        raise UserError(f"a detector with {type(self).__name__} cannot be exported: the head has no detect_batch")
