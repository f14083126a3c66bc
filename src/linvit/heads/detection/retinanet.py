"""RetinaNet: two towers of convolutions on each map of a pyramid predict class and box of every anchor.

Paper: Lin et al. 2017, "Focal Loss for Dense Object Detection"; the details are those of mmdetection 2.x, with which
the PVT papers train (Wang et al. 2021).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import sigmoid_focal_loss

from linvit.attention.ops.functional import upcast
from linvit.errors import check_number
from linvit.heads.base import rows
from linvit.heads.detection.anchors import IGNORED, Anchors, Assigner, by_anchor
from linvit.heads.detection.base import DetectionHead, ImageShape, ImageShapes, Target, positions
from linvit.heads.detection.boxes import (
    DROPPED,
    BoxCoder,
    best_of_batch,
    check_limits,
    gather_rows,
    has_area,
    top_of_batch,
)
from linvit.heads.layers import FPN, TwoMoreLevels, conv, tower

PRIOR = 0.01  # initial score of all classes


class RetinaNet(DetectionHead):
    """Class and box of every anchor in one stage, on the maps at a reduction of 8 or more.

    torchvision's RetinaNet differs in anchors, pyramid, divisors of losses and choice of detections.

    Args:
        width: Channels of the pyramid and of the towers.
        fpn: Join the maps by a feature pyramid network; false if they already have `width` channels.
        convs: Convolutions of a tower.
        extra_source: Input of the first of the two additional levels of the pyramid: "input", the last map of
            the backbone, or "output", that of the pyramid.
        extra_relu: Apply a ReLU before the second of them.
        anchor_scale: Side of the smallest anchors, in strides; those of 1.26 and 1.59 times that side follow.
        candidate_rule: Candidates of a level: "anchors", the best anchors by their best class
            (mmdetection 2.x and the papers), or "pairs", the best of the pairs of anchor and class above the threshold,
            without boxes that have no area in the image (mmdetection 3.x).
        candidates: Number of candidates of a level.
    """

    fpn_width = "width"

    def __init__(
        self,
        channels: Sequence[int],
        reductions: Sequence[int],
        num_classes: int,
        *,
        width: int = 256,
        fpn: bool = True,
        convs: int = 4,
        extra_source: Literal["input", "output"] = "input",
        extra_relu: bool = False,
        anchor_scale: float = 4,
        candidate_rule: Literal["anchors", "pairs"] = "anchors",
        candidates: int = 1000,
        score_threshold: float = 0.05,
        nms_threshold: float = 0.5,
        max_detections: int = 100,
    ) -> None:
        super().__init__(channels, reductions, num_classes)
        self.check_pyramid(finest=8)
        check_number("candidates", candidates, at_least=1, whole=True)
        check_number("anchor_scale", anchor_scale, above=0)
        check_limits(score_threshold, nms_threshold, max_detections)
        self.candidate_rule, self.candidates, self.score_threshold = candidate_rule, candidates, score_threshold
        self.nms_threshold, self.max_detections = nms_threshold, max_detections
        self.fpn = FPN(channels, width, TwoMoreLevels(channels[-1], width, extra_source, extra_relu), fpn)
        strides = [*reductions, 2 * reductions[-1], 4 * reductions[-1]]
        self.anchors = Anchors(strides, scales=[anchor_scale * 2 ** (i / 3) for i in range(3)])
        self.coder, self.assigner = BoxCoder(), Assigner(positive=0.5, negative=0.4)
        self.cls_tower, self.box_tower = tower(width, convs), tower(width, convs)
        self.classifier = conv(width, self.anchors.per_cell * num_classes)
        nn.init.constant_(self.classifier.bias, -math.log((1 - PRIOR) / PRIOR))  # type: ignore[arg-type]
        self.regressor = conv(width, self.anchors.per_cell * 4)

    @classmethod
    def levels(cls, reductions: Sequence[int]) -> list[int]:
        """Returns the positions of the maps at a reduction of 8 or more."""
        return [i for i, reduction in enumerate(reductions) if reduction >= 8]

    @classmethod
    def classes_in(cls, state: Mapping[str, Tensor]) -> int:
        """Returns the number of classes of the weights of such a head: an anchor has as many scores, and four sides."""
        return 4 * rows(state, "classifier.weight") // max(1, rows(state, "regressor.weight"))

    def classifiers(self) -> list[nn.Module]:
        """Returns the last layer of the tower of classes."""
        return [self.classifier]

    def losses(
        self, features: Sequence[Tensor], images: Sequence[ImageShape], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        """Returns `loss_cls` (focal) and `loss_bbox` (absolute error), both over the number of positive anchors."""
        return self.loss(*self.predict(self.fpn(features)), images, targets)

    def predict(self, maps: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns for each level logits (B, A K, H_i, W_i) and boxes (B, 4 A, H_i, W_i) relative to the anchors."""
        return (
            [self.classifier(self.cls_tower(x)) for x in maps],
            [self.regressor(self.box_tower(x)) for x in maps],
        )

    def loss(
        self, scores: Sequence[Tensor], boxes: Sequence[Tensor], images: Sequence[ImageShape], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        """Returns the losses of raw maps, sums over images and levels.

        They are divided by the sum over images of the number of positive anchors, at least 1 per image.
        """
        anchors = torch.cat(self.anchors(scores))
        logits = torch.cat([by_anchor(x, self.num_classes) for x in scores], 1)  # (B, n, K)
        deltas = torch.cat([by_anchor(x, 4) for x in boxes], 1)  # (B, n, 4)
        positives = 0
        cls_loss = box_loss = upcast(logits[:0]).sum()
        matched = [
            self.assigner(anchors, target["boxes"], self.anchors.on_image(scores, image.padded))
            for image, target in zip(images, targets, strict=True)
        ]
        for i, positive in enumerate(positions([of_image >= 0 for of_image in matched])):
            true = matched[i][positive]
            of_image = upcast(logits[i])
            wanted = torch.zeros_like(of_image)
            wanted[positive, targets[i]["labels"][true]] = 1
            used = (matched[i] != IGNORED)[:, None]
            cls_loss = cls_loss + (sigmoid_focal_loss(of_image, wanted) * used).sum()
            wanted_deltas = self.coder.encode(anchors[positive], targets[i]["boxes"][true])
            box_loss = box_loss + F.l1_loss(upcast(deltas[i][positive]), wanted_deltas, reduction="sum")
            positives += max(1, len(positive))
        return {"loss_cls": cls_loss / positives, "loss_bbox": box_loss / positives}

    def detect_batch(self, features: Sequence[Tensor], image: ImageShape | ImageShapes) -> dict[str, Tensor]:
        """Returns the detections of a batch; see `DetectionHead`."""
        return self.results(*self.predict(self.fpn(features)), image)

    def results(
        self, logits: Sequence[Tensor], boxes: Sequence[Tensor], image: ImageShape | ImageShapes
    ) -> dict[str, Tensor]:
        """Returns the detections of raw maps."""
        found = []
        for anchors, of_level, deltas in zip(self.anchors(logits), logits, boxes, strict=True):
            scores = upcast(by_anchor(of_level, self.num_classes)).sigmoid()
            pairs = self.candidate_rule == "pairs"
            best, place = top_of_batch(scores.flatten(1) if pairs else scores.amax(2), self.candidates)
            row = place // self.num_classes if pairs else place
            moved = image.clip(self.coder.decode(anchors[row], gather_rows(by_anchor(deltas, 4), row)))
            chosen, usable = gather_rows(scores, row), (best > DROPPED)[..., None]
            if pairs:
                labels = torch.arange(self.num_classes, device=place.device)
                usable = usable & has_area(moved)[..., None] & (place[..., None] % self.num_classes == labels)
            found.append((image.to_original(moved), chosen.where(usable & (chosen > self.score_threshold), DROPPED)))
        inside, scores = (torch.cat(of_levels, 1) for of_levels in zip(*found, strict=True))
        return best_of_batch(inside, scores, self.nms_threshold, self.max_detections)
