"""What a detector is given: images, sizes and the truth of a batch, checked before anything is computed."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.errors import UserError
from linvit.heads.detection.base import ImageShape, Size, Target
from linvit.heads.detection.boxes import has_area


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


def check_sizes(sizes: Sequence[Sequence[int]], count: int) -> list[Size]:
    """Returns original sizes as pairs of positive numbers, one per image."""
    found = [tuple(int(side) for side in size) for size in sizes]
    if len(found) != count or any(len(size) != 2 or min(size) < 1 for size in found):
        raise UserError(f"sizes must have one (height, width) for each of the {count} images; got {list(sizes)}")
    return found  # type: ignore[return-value]


def check_targets(
    targets: Sequence[Target] | None, images: Sequence[ImageShape], num_classes: int, with_masks: bool
) -> Sequence[Target]:
    """Returns the targets of a batch."""
    names = ("boxes", "labels", "masks")[: 3 if with_masks else 2]
    if targets is None:
        raise UserError(
            f"in training mode a detector needs targets, one mapping with {', '.join(names)} per image; for detections "
            f"call eval() first"
        )
    if len(targets) != len(images):
        raise UserError(f"there are {len(images)} images and {len(targets)} targets; give one target per image")
    for i, (target, image) in enumerate(zip(targets, images, strict=True)):
        missing = [name for name in names if name not in target]
        if missing:
            hint = ", or take a head without masks, such as faster_rcnn" if missing == ["masks"] else ""
            raise UserError(f"the target of image {i} has no {' and no '.join(missing)}; it has {list(target)}{hint}")
        count = len(target["labels"])
        shapes = {"boxes": (count, 4), "labels": (count,), "masks": (count, *image.size)}
        for name in names:
            if tuple(target[name].shape) != shapes[name]:
                raise UserError(
                    f"in the target of image {i}, {name} must be a tensor {shapes[name]} beside {count} labels and an "
                    f"image of {image.size[0]} x {image.size[1]}; got {tuple(target[name].shape)}"
                )
    labels = torch.cat([target["labels"] for target in targets])
    if len(labels):
        least, greatest = (int(label) for label in labels.aminmax())
        if least < 0 or greatest >= num_classes:
            raise UserError(
                f"labels must lie between 0 and {num_classes - 1}: the detector has {num_classes} classes, without one "
                f"for the background; got labels from {least} to {greatest}"
            )
    return targets


def usable(target: Target, image: ImageShape) -> Target:
    """Returns the target without boxes that have no area in the image, with masks of the padded image's size."""
    keep = has_area(image.clip(target["boxes"]))
    found = {"boxes": target["boxes"][keep], "labels": target["labels"][keep]}
    if "masks" in target:
        below, right = (image.padded[i] - image.size[i] for i in (0, 1))
        found["masks"] = F.pad(target["masks"][keep], (0, right, 0, below))
    return found
