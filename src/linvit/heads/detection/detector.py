"""Network of object detection: a backbone and a head; maps images of several sizes to losses or detections."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.errors import UserError
from linvit.heads.create import DenseNetwork, backbone_and_head, feature_maps
from linvit.heads.detection.base import DetectionHead, Detections, ImageShape, Target, positions
from linvit.heads.detection.boxes import has_area
from linvit.heads.neck import SimpleFeaturePyramid
from linvit.registry import Spec

DIVISOR = 32  # of the sides of padded images


class Detector(DenseNetwork):
    """Backbone and head of object detection or instance segmentation, called like torchvision's detectors.

    There are three differences: classes are 0 to K - 1, without one for the background; images are normalised and
    resized before; and detections can be returned in pixels of the original images.
    """

    def __init__(self, backbone: nn.Module, head: DetectionHead, neck: SimpleFeaturePyramid | None = None) -> None:
        super().__init__(backbone, head, neck)
        self.with_masks = head.with_masks
        self._feature_maps: Any = feature_maps

    def forward(
        self,
        images: Sequence[Tensor],
        targets: Sequence[Target] | None = None,
        sizes: Sequence[Sequence[int]] | None = None,
    ) -> dict[str, Tensor] | list[Detections]:
        """Returns losses in training mode, and detections in evaluation mode.

        Args:
            images: Normalised images (3, h, w) of any sizes, including odd ones.
            targets: In training mode, the targets of each image: `boxes` (n, 4) in its pixels, `labels` (n,) and, if
                `with_masks`, `masks` (n, h, w) of 0 and 1. n may be 0. Boxes without an area in the image are left out.
            sizes: The original size (H, W) of each image, for detections; None is that of the given image.

        Returns:
            In training mode scalar losses by name. In evaluation mode for each image `boxes` (n, 4), `labels` (n,),
            `scores` (n,), the best first, and, if `with_masks`, `masks` (n, H, W) of bool.

        Raises:
            UserError: If there is no image, or if images or targets have another form.
        """
        check_images(images)
        given = [(image.shape[-2], image.shape[-1]) for image in images]
        original = given if sizes is None else [(int(height), int(width)) for height, width in sizes]
        shapes = [ImageShape(*each) for each in zip(given, padded_sizes(images), original, strict=True)]
        truth = None
        if self.training:
            checked = check_targets(targets, shapes, self.num_classes, self.with_masks)
            truth = usable(checked, shapes)
        return self.head(self.feature_maps(images), shapes, truth)  # type: ignore[no-any-return]

    def detect_batch(self, images: Tensor) -> dict[str, Tensor]:
        """Returns detections of normalised images (B, 3, H, W) in the form of `DetectionHead.detect_batch`."""
        size = (images.shape[2], images.shape[3])
        (padded,) = padded_sizes([images])
        return self.head.detect_batch(self.feature_maps(images), ImageShape(size, padded, size))  # type: ignore[no-any-return]

    def feature_maps(self, images: Sequence[Tensor] | Tensor) -> list[Tensor]:
        """Returns the input of the head for images (3, h, w): maps (B, C, H', W') of all, padded to one size."""
        return self.through_neck(self._feature_maps(self.backbone, pad_and_stack(images), self.pyramid.indices))

    def compile(self, **options: Any) -> None:
        """Compiles the backbone in place; the sizes in the rest depend on the content of the images."""
        self._feature_maps = torch.compile(feature_maps, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies, which are not compiled, like those of other modules."""
        return {**super().__getstate__(), "_feature_maps": feature_maps}  # type: ignore[no-untyped-call]


def pad_and_stack(images: Sequence[Tensor] | Tensor) -> Tensor:
    """Returns images (3, h, w), or a batch, as one batch (B, 3, H, W), with zeros to the right and below."""
    if isinstance(images, Tensor):  # in a program for any size the need for padding is unknown
        ((height, width),) = padded_sizes([images])
        return F.pad(images, (0, DIVISOR - 1, 0, DIVISOR - 1))[..., :height, :width]
    height, width = (max(sides) for sides in zip(*padded_sizes(images), strict=True))
    return torch.stack([F.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2])) for x in images])


def padded_sizes(images: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Returns the sizes (H, W) to which images (3, h, w) are padded."""
    height, width = ([(x.shape[i] + DIVISOR - 1) // DIVISOR * DIVISOR for x in images] for i in (-2, -1))
    return list(zip(height, width, strict=True))  # not -(-x // 32): ONNX divides integers towards 0


def check_images(images: Sequence[Tensor]) -> None:
    """Raises a `UserError` unless there are images (C, h, w) of floats."""
    if not len(images):
        raise UserError("a detector needs at least one image; got an empty list")
    for i, image in enumerate(images):
        if image.ndim != 3 or not image.is_floating_point() or 0 in image.shape:
            raise UserError(
                f"a detector takes a list of normalised images (3, h, w) of floats; image {i} is a tensor "
                f"{tuple(image.shape)} of {str(image.dtype).removeprefix('torch.')}"
            )


def check_targets(
    targets: Sequence[Target] | None, images: Sequence[ImageShape], num_classes: int, with_masks: bool
) -> Sequence[Target]:
    """Returns the targets of a batch if they have the form that `Detector.forward` takes; else a `UserError`."""
    names = ("boxes", "labels", "masks")[: 3 if with_masks else 2]
    if targets is None:
        raise UserError(
            f"in training mode a detector needs targets, one mapping with {', '.join(names)} per image; for detections "
            f"call eval() first"
        )
    if len(targets) != len(images):
        raise UserError(f"there are {len(images)} images and {len(targets)} targets; give one target per image")
    for i, (target, image) in enumerate(zip(targets, images, strict=True)):
        count = len(target.get("labels", ()))
        shapes = {"boxes": (count, 4), "labels": (count,), "masks": (count, *image.size)}
        for name in ("labels", *names):
            if name not in target or tuple(target[name].shape) != shapes[name]:
                got = f"got {tuple(target[name].shape)}" if name in target else f"it has only {', '.join(target)}"
                raise UserError(f"the target of image {i} needs {name}, a tensor {shapes[name]}; {got}")
    labels = torch.cat([target["labels"] for target in targets])
    if len(labels):
        least, greatest = torch.stack(labels.aminmax()).tolist()
        if least < 0 or greatest >= num_classes:
            raise UserError(
                f"labels must be between 0 and {num_classes - 1}: the detector has {num_classes} classes, without one "
                f"for the background; got labels from {least} to {greatest}"
            )
    return targets


def usable(targets: Sequence[Target], images: Sequence[ImageShape]) -> list[Target]:
    """Returns the targets without boxes that have no area in their image, with masks padded to the images' sizes."""
    kept = positions([has_area(image.clip(target["boxes"])) for target, image in zip(targets, images, strict=True)])
    found: list[Target] = []
    for target, image, row in zip(targets, images, kept, strict=True):
        chosen = {"boxes": target["boxes"][row], "labels": target["labels"][row]}
        if "masks" in target:
            below, right = (image.padded[i] - image.size[i] for i in (0, 1))
            chosen["masks"] = F.pad(target["masks"][row], (0, right, 0, below))
        found.append(chosen)
    return found


def create_detector(
    backbone: Spec,
    head: Spec,
    num_classes: int,
    attention: Spec | Sequence[Spec] | None = None,
    img_size: int | Sequence[int] = 224,
    drop_path_rate: float = 0.0,
    in_chans: int = 3,
) -> Detector:
    """Creates a network of object detection or instance segmentation.

    Arguments and errors are those of `linvit.create_segmentor`; images may be of any size.

    Example:
        >>> model = linvit.create_detector(backbone="pvt_v2_b0", head="retinanet", num_classes=80)
        >>> detections = model.eval()([torch.randn(3, 97, 131), torch.randn(3, 64, 80)])
        >>> sorted(detections[0])
        ['boxes', 'labels', 'scores']
    """
    return Detector(
        *backbone_and_head("detection", backbone, head, num_classes, attention, img_size, drop_path_rate, in_chans)
    )
