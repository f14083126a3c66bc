"""Each cell of one map predicts the class and the box of the object that it lies in, without anchors.

Paper: Redmon et al. 2016, "You Only Look Once: Unified, Real-Time Object Detection", much simplified.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.ops import batched_nms

import linvit


class Cells(linvit.DetectionHead):
    """Scores and distances to the four sides of a box, at the cells of the finest map at a reduction of 8 or more."""

    def __init__(self, channels, reductions, num_classes, *, max_detections=100):
        super().__init__(channels, reductions, num_classes)
        self.max_detections = max_detections
        self.classifier = nn.Conv2d(channels[0], num_classes, 1)
        self.sides = nn.Conv2d(channels[0], 4, 1)

    @classmethod
    def levels(cls, reductions):
        return [i for i, reduction in enumerate(reductions) if reduction >= 8][:1]

    def classifiers(self):
        return [self.classifier]

    def predict(self, features):
        """Centres (n, 2), logits (B, n, K) and boxes (B, n, 4), in at least float32 also under autocast."""
        x, stride = features[0], self.reductions[0]
        y, x_ = (stride * (torch.arange(side, device=x.device) + 0.5) for side in x.shape[-2:])
        centres = torch.cartesian_prod(y, x_).flip(1)
        logits, sides = (
            maps.flatten(2).mT.to(torch.promote_types(maps.dtype, torch.float32))
            for maps in (self.classifier(x), self.sides(x))
        )
        sides = stride * sides.clamp(max=6).exp()
        return centres, logits, torch.cat([centres - sides[..., :2], centres + sides[..., 2:]], -1)

    def losses(self, features, images, targets):
        centres, logits, boxes = self.predict(features)
        scores, errors = logits.sum() * 0, boxes.sum() * 0  # 0, but they depend on the features
        for logit, box, target in zip(logits, boxes, targets, strict=True):
            truth, wanted = target["boxes"], torch.zeros_like(logit)
            inside = ((centres[:, None] > truth[:, :2]) & (centres[:, None] < truth[:, 2:])).all(-1)  # (n, m)
            cell, object_ = inside.nonzero(as_tuple=True)
            wanted[cell, target["labels"][object_]] = 1
            scores = scores + F.binary_cross_entropy_with_logits(logit, wanted)
            errors = errors + F.smooth_l1_loss(box[cell], truth[object_], reduction="sum") / max(1, len(cell))
        return {"loss_cls": scores, "loss_bbox": 0.05 * errors}

    def detect(self, features, images):
        _, logits, boxes = self.predict(features)
        found = []
        for logit, box, image in zip(logits, boxes, images, strict=True):
            scores, labels = logit.sigmoid().max(1)
            box = image.to_original(image.clip(box))
            keep = batched_nms(box, scores, labels, 0.5)[: self.max_detections]
            found.append({"boxes": box[keep], "labels": labels[keep], "scores": scores[keep]})
        return found
