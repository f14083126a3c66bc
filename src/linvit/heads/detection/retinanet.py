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
from linvit.heads.detection.base import DetectionHead, Detections, ImageShape, Target
from linvit.heads.detection.batched import DROPPED, best_of_batch, gather_rows, top_of_batch
from linvit.heads.detection.boxes import BoxCoder, best, check_limits, has_area, top
from linvit.heads.detection.device import positions
from linvit.heads.layers import FPN, TwoMoreLevels, conv, tower

PRIOR = 0.01  # what the scores of all classes are at first


class RetinaNet(DetectionHead):
    """Class and box of every anchor in one stage, on the maps at a reduction of 8 or more.

    torchvision has a RetinaNet, too, whose anchors, pyramid, divisors of losses and choice of detections are others.

    Args:
        width: Channels of the pyramid and of the towers.
        fpn: Join the maps by a feature pyramid network; false if they are of `width` channels already.
        convs: Convolutions of a tower.
        extra_source: What the first of the two additional levels of the pyramid is made from: "input", the last map of
            the backbone, or "output", that of the pyramid.
        extra_relu: Whether a ReLU comes before the second of them.
        anchor_scale: Side of the smallest anchors, in strides; those of 1.26 and 1.59 times that side follow.
        candidate_rule: Which candidates of a level are looked at: "anchors", the best anchors by their best class
            (mmdetection 2.x and the papers), or "pairs", the best of the pairs of anchor and class above the threshold,
            without boxes that have no area in the image (mmdetection 3.x).
        candidates: How many of a level.
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
        """Returns how many classes the weights of such a head are for: an anchor has as many scores, and four sides."""
        return 4 * rows(state, "classifier.weight") // max(1, rows(state, "regressor.weight"))

    def classifiers(self) -> list[nn.Module]:
        """Returns the last layer of the tower of classes."""
        return [self.classifier]

    def losses(
        self, features: Sequence[Tensor], images: Sequence[ImageShape], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        """Returns `loss_cls` (focal) and `loss_bbox` (absolute error), both over the number of positive anchors."""
        return self.loss(*self.predict(self.fpn(features)), images, targets)

    def detect(self, features: Sequence[Tensor], images: Sequence[ImageShape]) -> list[Detections]:
        """Returns the detections of each image."""
        return self.results(*self.predict(self.fpn(features)), images)

    def predict(self, maps: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns logits (B, A K, H_i, W_i) and boxes (B, 4 A, H_i, W_i) relative to the anchors, of each level."""
        return (
            [self.classifier(self.cls_tower(x)) for x in maps],
            [self.regressor(self.box_tower(x)) for x in maps],
        )

    def loss(
        self, scores: Sequence[Tensor], boxes: Sequence[Tensor], images: Sequence[ImageShape], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        """Returns the losses of raw maps, sums over images and levels.

        Their divisor is the sum over images of the number of positive anchors, at least 1 of each.
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

    def results(
        self, scores: Sequence[Tensor], boxes: Sequence[Tensor], images: Sequence[ImageShape]
    ) -> list[Detections]:
        """Returns the detections of raw maps, for each image."""
        anchors = self.anchors(scores)
        by_level = [
            (by_anchor(logits, self.num_classes), by_anchor(deltas, 4))
            for logits, deltas in zip(scores, boxes, strict=True)
        ]
        return [
            self._of_image(
                [(a, upcast(logits[i]).sigmoid(), d[i]) for a, (logits, d) in zip(anchors, by_level, strict=True)], x
            )
            for i, x in enumerate(images)
        ]

    def detect_batch(self, features: Sequence[Tensor], image: ImageShape) -> dict[str, Tensor]:
        """Returns the detections of images of one size; see `DetectionHead`."""
        logits, deltas = self.predict(self.fpn(features))
        found = []
        for anchors, scores, moves in zip(
            self.anchors(logits),
            (upcast(by_anchor(x, self.num_classes)).sigmoid() for x in logits),
            (by_anchor(x, 4) for x in deltas),
            strict=True,
        ):
            pairs = self.candidate_rule == "pairs"
            ranked = scores.flatten(1) if pairs else scores.amax(2)
            best, place = top_of_batch(ranked, self.candidates)
            row = place // self.num_classes if pairs else place
            boxes = image.clip(self.coder.decode(anchors[row], gather_rows(moves, row)))  # (B, k, 4)
            if pairs:
                usable = has_area(boxes)[..., None] & (
                    place[..., None] % self.num_classes == torch.arange(self.num_classes, device=place.device)
                )
                scores = best[..., None].where(usable, DROPPED)
            else:
                scores = gather_rows(scores, row).where(best[..., None] > DROPPED, DROPPED)
            found.append((boxes, scores.where(scores > self.score_threshold, DROPPED)))
        boxes, scores = (torch.cat(of_levels, 1) for of_levels in zip(*found, strict=True))
        return best_of_batch(boxes, scores, self.nms_threshold, self.max_detections)

    def _of_image(self, levels: Sequence[tuple[Tensor, Tensor, Tensor]], image: ImageShape) -> Detections:
        """Anchors (n, 4), scores (n, K) and deltas (n, 4) of each level to detections."""
        pairs, found = self.candidate_rule == "pairs", []
        if not pairs:
            chosen = [
                top(s.amax(1), self.candidates) if len(s) > self.candidates else slice(None) for _, s, _ in levels
            ]
            levels = [(a[row], s[row], d[row]) for row, (a, s, d) in zip(chosen, levels, strict=True)]
        above = positions([(scores > self.score_threshold).flatten() for _, scores, _ in levels])
        for (anchors, scores, deltas), place in zip(levels, above, strict=True):
            if pairs:
                place = place[top(scores.flatten()[place], self.candidates)]
            row, label = place // self.num_classes, place % self.num_classes
            boxes = image.to_original(image.clip(self.coder.decode(anchors[row], deltas[row])))
            found.append((boxes, scores[row, label], label))
        boxes, scores, labels = (torch.cat(of_levels) for of_levels in zip(*found, strict=True))
        if pairs:
            (kept,) = positions([has_area(boxes)])
            boxes, scores, labels = boxes[kept], scores[kept], labels[kept]
        return best(boxes, scores, labels, self.nms_threshold, self.max_detections)
