"""Base class of two-stage detectors: a region proposal network, and stages that process its proposals.

Faster R-CNN and Mask R-CNN are cascades of one stage.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from linvit.errors import check_number
from linvit.heads.base import rows
from linvit.heads.detection.anchors import Assigner, Sampler
from linvit.heads.detection.base import DetectionHead, Detections, ImageShape, ImageShapes, Target
from linvit.heads.detection.box_head import BoxHead
from linvit.heads.detection.boxes import DROPPED, best_of_batch, check_limits
from linvit.heads.detection.masks import MaskHead, paste_masks
from linvit.heads.detection.rpn import RPN
from linvit.heads.detection.stage import RoIStage, StageSettings
from linvit.heads.layers import FPN


class TwoStage(DetectionHead):
    """A feature pyramid, a region proposal network, and one stage or a cascade of them.

    torchvision's `FasterRCNN` and `MaskRCNN` are not used: their anchors, RoI features, losses and results differ,
    and these parts cannot be replaced separately.

    Args:
        width: Channels of the pyramid and of the convolutions.
        fpn: Join the maps by a feature pyramid network; false if they already have `width` channels.
        fc_width: Features of the linear layers of a box head.
        anchor_scale: Side of the square anchors, in strides of their map.
        finest_scale: Boxes whose square root of the area is less than twice this, in pixels, use the finest
            map.
        anchor_samples: Anchors per image for training the proposal network.
        roi_samples: Proposals per image for training a stage, up to a quarter of them positive.
        candidates: Number of the best anchors of a level that become boxes, in training and in evaluation.
        proposals: Number of these boxes that are proposed, in training and in evaluation.
        drop_empty: Drop proposals without area (mmdetection 3.x) instead of keeping them (2.x and the papers).
    """

    fpn_width = "width"
    cascade: ClassVar[tuple[StageSettings, ...]] = (StageSettings(0.5, (0.1, 0.1, 0.2, 0.2), 1.0),)
    low_quality: ClassVar[bool] = True
    rpn_beta: ClassVar[float] = 0.0
    inside_only: ClassVar[bool] = False
    box_layers: ClassVar[tuple[int, int]] = (0, 2)  # convolutions, linear layers
    giou: ClassVar[bool] = False
    rpn_convs: ClassVar[int] = 1
    layer_norm: ClassVar[bool] = False

    def __init__(
        self,
        channels: Sequence[int],
        reductions: Sequence[int],
        num_classes: int,
        *,
        width: int = 256,
        fpn: bool = True,
        fc_width: int = 1024,
        anchor_scale: float = 8,
        finest_scale: float = 56,
        anchor_samples: int = 256,
        roi_samples: int = 512,
        candidates: Sequence[int] = (2000, 1000),
        proposals: Sequence[int] = (1000, 1000),
        drop_empty: bool = False,
        score_threshold: float = 0.05,
        nms_threshold: float = 0.5,
        max_detections: int = 100,
    ) -> None:
        super().__init__(channels, reductions, num_classes)
        self.check_pyramid()
        check_limits(score_threshold, nms_threshold, max_detections)
        check_number("roi_samples", roi_samples, at_least=1, whole=True)
        check_number("finest_scale", finest_scale, above=0)
        self.score_threshold, self.nms_threshold, self.max_detections = score_threshold, nms_threshold, max_detections
        self.fpn = FPN(channels, width, LastLevelMaxPool(), fpn)
        self.rpn = RPN(
            width,
            [*reductions, 2 * reductions[-1]],
            anchor_scale=anchor_scale,
            beta=self.rpn_beta,
            inside_only=self.inside_only,
            samples=anchor_samples,
            candidates=candidates,
            proposals=proposals,
            drop_empty=drop_empty,
            convs=self.rpn_convs,
        )
        convs, fcs = self.box_layers
        self.stages = nn.ModuleList(
            RoIStage(
                BoxHead(
                    width,
                    num_classes,
                    convs=convs,
                    fcs=fcs,
                    fc_width=fc_width,
                    stds=settings.stds,
                    giou=self.giou,
                    layer_norm=self.layer_norm,
                ),
                MaskHead(width, num_classes, layer_norm=self.layer_norm) if self.with_masks else None,
                reductions,
                Assigner(settings.iou, settings.iou, self.low_quality, least=settings.iou),
                Sampler(roi_samples, 0.25),
                finest_scale,
            )
            for settings in self.cascade
        )

    @classmethod
    def classes_in(cls, state: Mapping[str, Tensor]) -> int:
        """Returns the number of classes of the weights of such a head, without background."""
        return max(0, rows(state, "stages.0.box_head.classifier.weight") - 1)

    def classifiers(self) -> list[nn.Module]:
        """Returns the layers of classes, boxes and masks of every stage."""
        found: list[nn.Module] = []
        for stage in self._stages():
            found += [stage.box_head.classifier, stage.box_head.regressor]
            found += [] if stage.mask_head is None else [stage.mask_head.classifier]
        return found

    def losses(
        self, features: Sequence[Tensor], images: Sequence[ImageShape], targets: Sequence[Target]
    ) -> dict[str, Tensor]:
        """Returns `loss_rpn_cls`, `loss_rpn_bbox`, and `loss_cls`, `loss_bbox` and `loss_mask` of each stage.

        Names in a cascade begin with `s0_`, `s1_` and so on; the losses contain the weight of the stage.
        """
        maps = self.fpn(features)
        scores, boxes = self.rpn(maps)
        found = self.rpn.loss(scores, boxes, images, targets)
        proposed = self.rpn.propose(scores, boxes, ImageShapes(images))
        counts = proposed["num_detections"].tolist()
        proposals = [of_image[:count] for of_image, count in zip(proposed["boxes"], counts, strict=True)]
        return {**found, **self.roi_losses(maps, proposals, images, targets)}

    def roi_losses(
        self,
        maps: Sequence[Tensor],
        proposals: Sequence[Tensor],
        images: Sequence[ImageShape],
        targets: Sequence[Target],
    ) -> dict[str, Tensor]:
        """Returns the losses of the stages on maps and proposals (n, 4) of each image."""
        losses: dict[str, Tensor] = {}
        for i, (stage, settings) in enumerate(zip(self._stages(), self.cascade, strict=True)):
            found, proposals = stage.losses(maps, proposals, images, targets)
            prefix = f"s{i}_" if len(self.stages) > 1 else ""
            losses |= {f"{prefix}{name}": settings.weight * value for name, value in found.items()}
        return losses

    def detect(self, features: Sequence[Tensor], images: Sequence[ImageShape]) -> list[Detections]:
        """Returns the detections of each image."""
        found = super().detect(features, images)
        for one, image in zip(found, images, strict=True) if self.with_masks else ():
            one["masks"] = paste_masks(one["masks"], one["boxes"], image.original)
        return found

    def detect_batch(self, features: Sequence[Tensor], image: ImageShape | ImageShapes) -> dict[str, Tensor]:
        """Returns the detections of a batch; see `DetectionHead`."""
        maps = self.fpn(features)
        scores, boxes = self.rpn(maps)
        proposed = self.rpn.propose(scores, boxes, image)
        return self.results(maps, proposed["boxes"], proposed["num_detections"], image)

    def results(
        self, maps: Sequence[Tensor], boxes: Tensor, count: Tensor, image: ImageShape | ImageShapes
    ) -> dict[str, Tensor]:
        """Returns detections from maps and proposals (B, n, 4); `count` (B,) is their number in each image.

        Logits of classes and probabilities of masks are averaged over the stages; boxes are the last stage's.
        """
        scores, found = self._classify(maps, boxes, image)
        real = torch.arange(boxes.shape[1], device=boxes.device) < count[:, None]  # (B, n)
        scores = scores.where(real[..., None] & (scores > self.score_threshold), DROPPED)
        inside = image.to_original(image.clip(found))
        best = best_of_batch(inside, scores, self.nms_threshold, self.max_detections)
        if self.with_masks:
            masks = self._masks(maps, _rois(image.from_original(best["boxes"])), best["labels"].flatten())
            best["masks"] = masks.view(*best["labels"].shape, *masks.shape[1:])
        return best

    def _classify(
        self, maps: Sequence[Tensor], boxes: Tensor, image: ImageShape | ImageShapes
    ) -> tuple[Tensor, Tensor]:
        """Returns scores (B, n, K) and boxes (B, n, K, 4), or (B, n, 4), of proposals (B, n, 4)."""
        shape = boxes.shape[:2]
        total: Tensor | None = None
        for i, stage in enumerate(self._stages()):
            rois = _rois(boxes)
            logits, deltas = stage.boxes(maps, rois)
            total = logits if total is None else total + logits
            if i + 1 < len(self.stages):
                boxes = image.clip(stage.box_head.refine(rois[:, 1:], deltas, logits).view(*shape, 4))
        assert total is not None
        scores = (total / len(self.stages)).softmax(1)[:, :-1].view(*shape, -1)
        found = stage.box_head.decode(rois[:, 1:], deltas)
        return scores, found.view(*shape, *found.shape[1:])

    def _masks(self, maps: Sequence[Tensor], rois: Tensor, labels: Tensor) -> Tensor:
        """Returns probabilities (n, 28, 28) of the pixels of RoIs (n, 5) of these classes (n,)."""
        stages = self._stages()
        features = stages[0].mask_features(maps, rois)  # the same for all stages
        of_stages = [stage.mask_head.of_class(features, labels).sigmoid() for stage in stages]  # type: ignore[union-attr]
        return torch.stack(of_stages).mean(0)

    def _stages(self) -> list[RoIStage]:
        return list(self.stages)  # type: ignore[arg-type]


def _rois(boxes: Tensor) -> Tensor:
    """Returns boxes (B, n, 4) as RoIs (B n, 5), with the image's number in front."""
    image = torch.arange(boxes.shape[0], device=boxes.device).to(boxes)[:, None, None].expand(-1, boxes.shape[1], 1)
    return torch.cat([image, boxes], 2).flatten(0, 1)
