"""The box head: class and box of each region of interest.

Papers: Girshick 2015, "Fast R-CNN" (two linear layers); Wu and He 2018, "Group Normalization", Sec. 5.2 (four
convolutions and a linear layer, here with BatchNorm, as in the Cascade Mask R-CNN of the Swin paper, Liu et al. 2021).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.attention.ops.functional import upcast
from linvit.heads.detection.boxes import BoxCoder, generalized_iou
from linvit.heads.layers import ConvNormReLU

GIOU_WEIGHT = 10.0


class BoxHead(nn.Module):
    """Convolutions, then linear layers, then scores and boxes: (n, C, size, size) to (n, K + 1) and (n, 4 K).

    Without convolutions the layers are those of torchvision's `TwoMLPHead` and `FastRCNNPredictor`, but the background
    is the last column and has no box, and the losses differ: for boxes the error, quadratic up to `beta`, or ten times
    the generalised IoU loss.
    """

    def __init__(
        self,
        width: int,
        num_classes: int,
        *,
        convs: int = 0,
        fcs: int = 2,
        fc_width: int = 1024,
        size: int = 7,
        stds: Sequence[float] = (0.1, 0.1, 0.2, 0.2),
        giou: bool = False,
        beta: float = 0.0,
        class_agnostic: bool = False,
        layer_norm: bool = False,
    ) -> None:
        super().__init__()
        self.num_classes, self.coder, self.giou, self.beta = num_classes, BoxCoder(stds), giou, beta
        self.size, self.class_agnostic = size, class_agnostic
        self.convs = nn.Sequential(*(ConvNormReLU(width, width, layer_norm=layer_norm) for _ in range(convs)))
        ins = [width * size**2, *[fc_width] * (fcs - 1)]
        layers = [nn.Linear(into, fc_width) for into in ins]
        self.fcs = nn.ModuleList(layers)
        self.classifier = nn.Linear(fc_width, num_classes + 1)
        self.regressor = nn.Linear(fc_width, 4 if class_agnostic else 4 * num_classes)
        for layer in layers:
            nn.init.xavier_uniform_(layer.weight)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.normal_(self.regressor.weight, std=0.001)
        for layer in (*layers, self.classifier, self.regressor):
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits (n, K + 1), the background last, and boxes (n, 4 K), or (n, 4), relative to the RoIs."""
        x = self.convs(features).flatten(1)
        for layer in self.fcs:
            x = F.relu(layer(x))
        return upcast(self.classifier(x)), upcast(self.regressor(x))

    def loss(self, logits: Tensor, deltas: Tensor, boxes: Tensor, labels: Tensor, truth: Tensor) -> dict[str, Tensor]:
        """Returns `loss_cls` (cross-entropy) and `loss_bbox` (of positives), both over the number of all RoIs."""
        count = max(len(labels), 1)
        positive = (labels < self.num_classes).nonzero_static(size=len(truth))[:, 0]  # no host-device synchronisation
        chosen = self.of_class(deltas[positive], labels[positive])  # (p, 4)
        if self.giou:
            decoded = self.coder.decode(boxes[positive], chosen)
            box_loss = GIOU_WEIGHT * (1 - generalized_iou(decoded, truth)).sum()
        else:
            wanted = self.coder.encode(boxes[positive], truth)
            box_loss = F.smooth_l1_loss(chosen, wanted, beta=self.beta, reduction="sum")
        cls_loss = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss_cls": cls_loss / count, "loss_bbox": box_loss / count}

    def of_class(self, deltas: Tensor, labels: Tensor) -> Tensor:
        """Returns the boxes (n, 4) for these classes (n,) of deltas (n, 4 K), or (n, 4)."""
        if self.class_agnostic:
            return deltas
        rows = torch.arange(labels.shape[0], device=labels.device)
        return deltas.unflatten(1, (-1, 4))[rows, labels]  # type: ignore[no-any-return]

    def refine(self, boxes: Tensor, deltas: Tensor, logits: Tensor, labels: Tensor | None = None) -> Tensor:
        """Returns RoIs (n, 4) moved as predicted for their class; for background or unknown, the best other class."""
        best = logits[:, :-1].argmax(1)
        chosen = best if labels is None else torch.where(labels < self.num_classes, labels, best)
        return self.coder.decode(boxes, self.of_class(deltas, chosen))

    def decode(self, boxes: Tensor, deltas: Tensor) -> Tensor:
        """Returns the boxes of each class (n, K, 4), or for all of them (n, 4), of RoIs (n, 4)."""
        if self.class_agnostic:
            return self.coder.decode(boxes, deltas)
        return self.coder.decode(boxes[:, None], deltas.unflatten(1, (-1, 4)))
