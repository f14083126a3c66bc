"""Region proposal network: predicts for each anchor if there is an object, and its box.

Paper: Ren et al. 2015, "Faster R-CNN: Towards Real-Time Object Detection with Region Proposal Networks"; with a pyramid
as in Lin et al. 2017, "Feature Pyramid Networks for Object Detection", Sec. 4.1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.ops.functional import upcast
from linvit.errors import UserError, check_number
from linvit.heads.detection.anchors import Anchors, Assigner, Sampler, by_anchor
from linvit.heads.detection.base import ImageShape, ImageShapes, Target
from linvit.heads.detection.boxes import DROPPED, BoxCoder, best_of_batch, gather_rows, has_area, top_of_batch
from linvit.heads.layers import conv, tower

NMS_THRESHOLD = 0.7


class RPN(nn.Module):
    """A 3 x 3 convolution on every map, and two 1 x 1 convolutions for score and box of each anchor.

    torchvision's layers are the same; its losses, assignment and proposals differ, see `Assigner`, `Anchors`
    and `drop_empty` (before the proposals are chosen, as in mmdetection 3.x). The error of boxes is quadratic up to
    `beta`. With `inside_only` anchors that cross the border of the image are ignored in training.
    """

    def __init__(
        self,
        width: int,
        strides: Sequence[int],
        *,
        anchor_scale: float,
        beta: float,
        inside_only: bool,
        samples: int,
        candidates: Sequence[int],
        proposals: Sequence[int],
        drop_empty: bool,
        convs: int = 1,
    ) -> None:
        super().__init__()
        check_number("anchor_scale", anchor_scale, above=0)
        check_number("anchor_samples", samples, at_least=1, whole=True)
        for name, pair in (("candidates", candidates), ("proposals", proposals)):
            if not isinstance(pair, Sequence) or len(pair) != 2:
                raise UserError(
                    f"{name} must be two numbers, for training and evaluation, as [2000, 1000]; got {pair!r}"
                )
            for number in pair:
                check_number(f"an entry of {name} {list(pair)}", number, at_least=1, whole=True)
        self.anchors, self.coder = Anchors(strides, [anchor_scale]), BoxCoder()
        self.assigner, self.sampler = Assigner(positive=0.7, negative=0.3, least=0.3), Sampler(samples, 0.5)
        self.beta, self.inside_only, self.drop_empty = beta, inside_only, drop_empty
        self.candidates, self.proposals = tuple(candidates), tuple(proposals)
        self.conv = conv(width, width)
        self.more = tower(width, convs - 1)
        self.classifier = conv(width, self.anchors.per_cell, kernel=1)
        self.regressor = conv(width, self.anchors.per_cell * 4, kernel=1)

    def forward(self, maps: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Returns for each level logits (B, A, H_i, W_i) and boxes (B, 4 A, H_i, W_i) relative to the anchors."""
        hidden = [self.more(F.relu(self.conv(x))) for x in maps]
        return [self.classifier(x) for x in hidden], [self.regressor(x) for x in hidden]

    def loss(
        self, scores: Sequence[Tensor], boxes: Sequence[Tensor], images: Sequence[ImageShape], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        """Returns `loss_rpn_cls` and `loss_rpn_bbox`, sums over images and levels.

        They are divided by the sum over images of the numbers of sampled positives and negatives, at least 1 per image.
        """
        anchors = torch.cat(self.anchors(scores))
        logits = torch.cat([by_anchor(upcast(x), 1) for x in scores], 1)[..., 0]  # (B, n)
        deltas = torch.cat([by_anchor(upcast(x), 4) for x in boxes], 1)  # (B, n, 4)
        cls_loss = box_loss = logits[:0].sum()
        count = 0
        matched = [self.match(scores, anchors, *each) for each in zip(images, targets, strict=True)]
        for i, (positive, negative) in enumerate(self.sampler(matched)):
            rows = torch.cat([positive, negative])
            wanted = (matched[i][rows] >= 0).to(logits.dtype)
            cls_loss = cls_loss + F.binary_cross_entropy_with_logits(logits[i][rows], wanted, reduction="sum")
            wanted_deltas = self.coder.encode(anchors[positive], targets[i]["boxes"][matched[i][positive]])
            errors = F.smooth_l1_loss(deltas[i][positive], wanted_deltas, beta=self.beta, reduction="sum")
            box_loss = box_loss + errors
            count += max(1, len(positive)) + max(1, len(negative))
        return {"loss_rpn_cls": cls_loss / count, "loss_rpn_bbox": box_loss / count}

    def match(self, scores: Sequence[Tensor], anchors: Tensor, image: ImageShape, target: Target) -> Tensor:
        """Returns the assignment of all anchors (n, 4) of an image."""
        usable = self.anchors.on_image(scores, image.padded)
        if self.inside_only:
            height, width = image.size
            usable &= (anchors[:, :2] >= 0).all(1) & (anchors[:, 2] < width) & (anchors[:, 3] < height)
        return self.assigner(anchors, target["boxes"], usable)

    @torch.no_grad()
    def propose(
        self, scores: Sequence[Tensor], boxes: Sequence[Tensor], image: ImageShape | ImageShapes
    ) -> dict[str, Tensor]:
        """Returns proposals inside their images in the form of `best_of_batch`; labels are levels, scores logits."""
        candidates, limit = (pair[0 if self.training else 1] for pair in (self.candidates, self.proposals))
        found = []
        for i, anchors in enumerate(self.anchors(scores)):
            # by logits: onnxruntime's sigmoid is constant below -18, a value that proposals may have
            best, row = top_of_batch(by_anchor(upcast(scores[i]), 1)[..., 0], candidates)
            box = image.clip(self.coder.decode(anchors[row], gather_rows(by_anchor(boxes[i], 4), row)))
            if self.drop_empty:
                best = best.where(has_area(box), DROPPED)
            found.append((box, F.pad(best[..., None], (i, len(scores) - 1 - i), value=DROPPED)))
        box, score = (torch.cat(of_levels, 1) for of_levels in zip(*found, strict=True))
        return best_of_batch(box, score, NMS_THRESHOLD, limit, cut=self.training or not box.is_cuda)
