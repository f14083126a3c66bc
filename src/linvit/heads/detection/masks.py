"""Masks of boxes: prediction, crops of the true masks for training, and pasting into the image.

Paper: He et al. 2017, "Mask R-CNN", Sec. 3 and Fig. 4.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import clip_boxes_to_image, roi_align

from linvit.attention.ops.functional import upcast
from linvit.heads.detection.base import Size
from linvit.heads.layers import ConvNormReLU, tower

THRESHOLD = 0.5
PIXELS = 2**25
"""Pixels of the masks that a GPU pastes at once, which takes half a GiB."""


class MaskHead(nn.Module):
    """Convolutions, an upsampling by 2, and a classifier of pixels: (n, C, 14, 14) to (n, K, 28, 28).

    The layers are those of torchvision's `MaskRCNNHeads` and `MaskRCNNPredictor`, without a mask of the background.
    """

    def __init__(
        self, width: int, num_classes: int, *, convs: int = 4, size: int = 14, layer_norm: bool = False
    ) -> None:
        super().__init__()
        self.size = size
        self.convs = tower(width, convs)
        if layer_norm:
            self.convs = nn.Sequential(*(ConvNormReLU(width, width, layer_norm=True) for _ in range(convs)))
        self.upsample = nn.ConvTranspose2d(width, width, 2, stride=2)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor) -> Tensor:
        """Returns logits (n, K, 2 size, 2 size)."""
        return upcast(self.classifier(self.pixels(features)))

    def of_class(self, features: Tensor, labels: Tensor) -> Tensor:
        """Returns the logits (n, 2 size, 2 size) for one class each, (n,), without computing the others'."""
        weight, bias = self.classifier.weight[labels, :, 0, 0], self.classifier.bias  # (n, C), (K,)
        assert bias is not None
        logits = torch.einsum("nc,nchw->nhw", weight, self.pixels(features))
        return upcast(logits) + bias[labels, None, None]

    def pixels(self, features: Tensor) -> Tensor:
        """Returns the input of the classifier, (n, C, 2 size, 2 size)."""
        return F.relu(self.upsample(self.convs(features)), inplace=True)

    def loss(self, logits: Tensor, wanted: Tensor) -> Tensor:
        """Returns the mean binary cross-entropy of logits (n, s, s) and true masks of 0 and 1; 0 without RoIs."""
        errors = F.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype), reduction="sum")
        return errors / max(wanted.numel(), 1)


def mask_targets(masks: Tensor, boxes: Tensor, matched: Tensor, size: int) -> Tensor:
    """Returns the true mask within each of boxes (n, 4), (n, size, size) of 0 and 1.

    `matched` (n,) are the indices of the masks (m, H, W) of each box. torchvision's `project_masks_on_boxes` is half
    a pixel off, and does not round to 0 and 1.
    """
    if not len(boxes):
        return masks.new_zeros(0, size, size)
    inside = clip_boxes_to_image(boxes, (masks.shape[-2], masks.shape[-1]))
    rois = torch.cat([matched[:, None].to(inside), inside], 1)  # (n, 5)
    cut = roi_align(masks[:, None].to(rois.dtype), rois, size, 1.0, sampling_ratio=0, aligned=True)
    return (cut[:, 0] >= THRESHOLD).to(masks.dtype)  # type: ignore[no-any-return]


def paste_masks(masks: Tensor, boxes: Tensor, size: Size) -> Tensor:
    """Returns the masks in images of a size, (n, H, W) of bool.

    Each pixel's centre is looked up in the mask of the box by bilinear interpolation: for pixels around the box, or for
    all on a GPU, where reading the boxes would synchronise. torchvision's `paste_masks_in_image` resizes masks
    to boxes of whole pixels instead.
    """
    if masks.is_cuda:
        return _from_all_pixels(masks, boxes, size)
    found = torch.zeros(len(masks), *size, dtype=torch.bool, device=masks.device)
    each = zip(found, masks[:, None], boxes[:, None], boxes.tolist(), strict=True)
    for own, mask, box, (left, top, right, bottom) in each:
        rows = slice(max(0, math.floor(top) - 1), min(math.ceil(bottom) + 1, size[0]))  # one more pixel on each side
        columns = slice(max(0, math.floor(left) - 1), min(math.ceil(right) + 1, size[1]))
        if rows.start < rows.stop and columns.start < columns.stop:
            own[rows, columns] = _sample(mask, box, rows, columns)[0] >= THRESHOLD
    return found


def _from_all_pixels(masks: Tensor, boxes: Tensor, size: Size) -> Tensor:
    """Pastes like `paste_masks`, without reading the boxes, some masks at a time."""
    several = max(1, PIXELS // math.prod(size))
    each = zip(masks.split(several), boxes.split(several), strict=True)
    return torch.cat([_sample(*some, slice(0, size[0]), slice(0, size[1])) >= THRESHOLD for some in each])


def _sample(masks: Tensor, boxes: Tensor, rows: slice, columns: slice) -> Tensor:
    """Returns the masks (n, s, s) of boxes (n, 4) at pixels of the image, (n, rows, columns)."""
    y, x = (torch.arange(side.start, side.stop, device=masks.device) + 0.5 for side in (rows, columns))
    left, top, right, bottom = boxes.split(1, 1)
    x, y = (
        # 1 at the edges of the box; beyond 2 the mask is 0, also in a box without width
        ((at - start) / (end - start).clamp(min=1e-6) * 2 - 1).clamp(-2, 2)
        for at, start, end in ((x, left, right), (y, top, bottom))
    )
    grid = torch.stack(torch.broadcast_tensors(x[:, None], y[:, :, None]), -1)  # (n, rows, columns, 2)
    return F.grid_sample(masks[:, None], grid.to(masks.dtype), align_corners=False)[:, 0]
