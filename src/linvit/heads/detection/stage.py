"""Stage of a detector of regions of interest: samples proposals; predicts class, box and mask of each.

Papers: Girshick 2015, "Fast R-CNN"; He et al. 2017, "Mask R-CNN" (RoIAlign); Lin et al. 2017, "Feature Pyramid
Networks for Object Detection", Eq. 1 (the level); Cai and Vasconcelos 2018, "Cascade R-CNN".
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import roi_align

from linvit.attention.ops.functional import is_exporting, upcast
from linvit.heads.detection.anchors import Assigner, Sampler
from linvit.heads.detection.base import ImageShape, Target, positions
from linvit.heads.detection.box_head import BoxHead
from linvit.heads.detection.masks import MaskHead, mask_targets


class StageSettings(NamedTuple):
    """Settings in which the stages of a cascade differ."""

    iou: float
    stds: tuple[float, float, float, float]
    weight: float


class Samples(NamedTuple):
    """RoIs of one image that take part in the losses, positives first."""

    boxes: Tensor  # (n, 4)
    labels: Tensor  # (n,); K is background
    matched: Tensor  # index of the true box of each of the p positives, (p,)
    is_truth: Tensor  # True for copies of true boxes, (n,)


class RoIStage(nn.Module):
    """Box head, mask head, and the sampling of proposals for them."""

    def __init__(
        self,
        box_head: BoxHead,
        mask_head: MaskHead | None,
        reductions: Sequence[int],
        assigner: Assigner,
        sampler: Sampler,
        finest_scale: float = 56,
    ) -> None:
        super().__init__()
        self.box_head, self.mask_head = box_head, mask_head
        self.reductions, self.finest_scale = tuple(reductions), finest_scale
        self.assigner, self.sampler = assigner, sampler

    def sample(self, proposals: Sequence[Tensor], targets: Sequence[Target]) -> list[Samples]:
        """Returns the sampled proposals (n, 4) of each image, preceded by the true boxes."""
        truth = [target["boxes"].to(proposed.dtype) for target, proposed in zip(targets, proposals, strict=True)]
        matched = [
            torch.cat([torch.arange(len(own), device=own.device), self.assigner(proposed, own)])
            for own, proposed in zip(truth, proposals, strict=True)
        ]
        found = []
        for i, (positive, negative) in enumerate(self.sampler(matched)):
            rows = torch.cat([positive, negative])
            labels = torch.full_like(rows, self.box_head.num_classes)
            labels[: len(positive)] = targets[i]["labels"][matched[i][positive]]
            boxes = torch.cat([truth[i], proposals[i]])[rows]
            found.append(Samples(boxes, labels, matched[i][positive], rows < len(truth[i])))
        return found

    def boxes(self, maps: Sequence[Tensor], rois: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits and relative boxes of RoIs (n, 5)."""
        return self.box_head(self._features(maps, rois, self.box_head.size))  # type: ignore[no-any-return]

    def mask_features(self, maps: Sequence[Tensor], rois: Tensor) -> Tensor:
        """Returns the input of the mask head for RoIs (n, 5), (n, C, size, size)."""
        assert self.mask_head is not None
        return self._features(maps, rois, self.mask_head.size)

    def _features(self, maps: Sequence[Tensor], rois: Tensor, size: int) -> Tensor:
        return roi_features(maps[: len(self.reductions)], rois, self.reductions, size, self.finest_scale)

    def losses(
        self,
        maps: Sequence[Tensor],
        proposals: Sequence[Tensor],
        images: Sequence[ImageShape],
        targets: Sequence[Target],
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Returns the losses `loss_cls`, `loss_bbox` and `loss_mask`, and the proposals for the next stage."""
        samples = self.sample(proposals, targets)
        logits, deltas = self.boxes(maps, with_image([of_image.boxes for of_image in samples]))
        boxes, labels = (torch.cat([of_image[i] for of_image in samples]) for i in (0, 1))
        truth = torch.cat([t["boxes"][s.matched] for s, t in zip(samples, targets, strict=True)])
        found = self.box_head.loss(logits, deltas, boxes, labels, truth)
        if self.mask_head is not None:
            found["loss_mask"] = self.mask_loss(maps, samples, targets)
        with torch.no_grad():
            refined = self.box_head.refine(boxes, deltas, logits, labels).split([len(s.boxes) for s in samples])
            kept = positions([~of_image.is_truth for of_image in samples])
            following = [image.clip(moved[row]) for image, moved, row in zip(images, refined, kept, strict=True)]
        return found, following

    def mask_loss(self, maps: Sequence[Tensor], samples: Sequence[Samples], targets: Sequence[Target]) -> Tensor:
        """Returns the loss of the masks of the positives."""
        assert self.mask_head is not None
        boxes = [of_image.boxes[: len(of_image.matched)] for of_image in samples]
        labels = torch.cat([of_image.labels[: len(of_image.matched)] for of_image in samples])
        wanted = [
            mask_targets(target["masks"], of_image, sample.matched, 2 * self.mask_head.size)
            for target, of_image, sample in zip(targets, boxes, samples, strict=True)
        ]
        logits = self.mask_head.of_class(self.mask_features(maps, with_image(boxes)), labels)
        return self.mask_head.loss(logits, torch.cat(wanted))


def roi_levels(boxes: Tensor, finest_scale: float, count: int) -> Tensor:
    """Returns for each of boxes (n, 4) the map, of `count`, from which its features are taken, (n,).

    It is the finest one where the square root of the box's area is less than twice `finest_scale`, in pixels.
    """
    sides = (boxes[:, 2:] - boxes[:, :2]).prod(1).sqrt()
    return (sides / finest_scale + 1e-6).log2().floor().clamp(0, count - 1).long()


def with_image(boxes: Sequence[Tensor]) -> Tensor:
    """Returns the boxes (n_i, 4) of all images as RoIs (n, 5), with the image's number in front."""
    return torch.cat([F.pad(of_image, (1, 0), value=i) for i, of_image in enumerate(boxes)])


def roi_features(
    maps: Sequence[Tensor], rois: Tensor, reductions: Sequence[int], size: int, finest_scale: float
) -> Tensor:
    """Returns the features (n, C, size, size) of RoIs (n, 5), from maps (B, C, H_i, W_i).

    `torchvision.ops.MultiScaleRoIAlign` differs: it is half a pixel off (`aligned=False`), as the first version of
    Mask R-CNN. The operator itself is torchvision's, with as many samples as a box has pixels.
    """
    level = roi_levels(rois[:, 1:], finest_scale, len(maps))
    dtype = torch.promote_types(maps[0].dtype, torch.float32)
    if rois.is_cuda and not is_exporting():
        return _of_all_levels(maps, rois.to(dtype), level, reductions, size)
    rows = positions([level == i for i in range(len(maps))])
    cut = [  # also without boxes, so that every map has a gradient
        roi_align(upcast(x), rois[row].to(dtype), size, 1 / reduction, sampling_ratio=0, aligned=True)
        for x, row, reduction in zip(maps, rows, reductions, strict=True)
    ]
    if is_exporting():  # the exporter cannot infer that the levels' RoIs together are all
        out: Tensor = cut[0].new_zeros(rois.shape[0], *cut[0].shape[1:])
        for row, of_level in zip(rows, cut, strict=True):
            out = out.index_put((row,), of_level)
        return out.to(maps[0].dtype)
    return torch.cat(cut).index_select(0, torch.cat(rows).argsort()).to(maps[0].dtype)


def _of_all_levels(maps: Sequence[Tensor], rois: Tensor, level: Tensor, reductions: Sequence[int], size: int) -> Tensor:
    """Takes every RoI from every map, without synchronising for their numbers: boxes without sides give 0."""
    total = torch.zeros((), device=rois.device)
    for i, (x, reduction) in enumerate(zip(maps, reductions, strict=True)):
        own = torch.cat([rois[:, :1], rois[:, 1:].where((level == i)[:, None], 0)], 1)
        total = total + roi_align(upcast(x), own, size, 1 / reduction, sampling_ratio=0, aligned=True)
    return total.to(maps[0].dtype)
