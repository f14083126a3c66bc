"""Masks of boxes: cut out of the truth for training, and pasted into the image for results.

Paper: He et al. 2017, "Mask R-CNN", Sec. 3.1.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.ops import clip_boxes_to_image, roi_align

from linvit.heads.detection.base import Size

THRESHOLD = 0.5
CHUNK = 2**26
"""Pixels that are pasted at once on a GPU; four bytes each, several times."""


def mask_targets(masks: Tensor, boxes: Tensor, matched: Tensor, size: int) -> Tensor:
    """Returns the true mask within each of boxes (n, 4), (n, size, size) of 0 and 1.

    `matched` (n,) says which of the masks (m, H, W) belongs to each box. torchvision's `project_masks_on_boxes` is half
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

    Each pixel's centre is looked up in the mask of the box by bilinear interpolation. torchvision's
    `paste_masks_in_image` resizes masks to boxes of whole pixels instead.

    Args:
        masks: Probabilities within the boxes (n, s, s).
        boxes: (n, 4) in pixels of the images.
        size: (H, W).
    """
    found = torch.zeros(len(masks), *size, dtype=torch.bool, device=masks.device)
    step = _at_once(masks.device, size)
    for start in range(0, len(masks), step):
        chunk = slice(start, start + step)
        x1, y1, x2, y2 = _extent(boxes[chunk], size) if step == 1 else (0, 0, size[1], size[0])
        if x1 < x2 and y1 < y2:
            window = torch.arange(y1, y2, device=masks.device), torch.arange(x1, x2, device=masks.device)
            found[chunk, y1:y2, x1:x2] = _sample(masks[chunk], boxes[chunk], *window) >= THRESHOLD
    return found


def _at_once(device: torch.device, size: Size) -> int:
    """Returns how many masks are pasted at once: one on a processor, which then looks at its box alone."""
    return 1 if device.type == "cpu" else max(1, CHUNK // (size[0] * size[1]))


def _extent(boxes: Tensor, size: Size) -> tuple[int, int, int, int]:
    """Returns the whole pixels that boxes (n, 4) touch, and one more at each side, within the image."""
    x1, y1 = (max(0, int(side) - 1) for side in boxes[:, :2].amin(0).floor().tolist())
    x2, y2 = (int(side) + 1 for side in boxes[:, 2:].amax(0).ceil().tolist())
    return x1, y1, min(x2, size[1]), min(y2, size[0])


def _sample(masks: Tensor, boxes: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Returns masks (n, s, s) of boxes (n, 4) at the centres of pixels, (n, rows, columns)."""
    x, y = (
        # 1 at the edges of the box; beyond 2 the mask is 0 anyway, also in a box without width
        ((pixels + 0.5 - start[:, None]) / (end - start).clamp(min=1e-6)[:, None] * 2 - 1).clamp(-2, 2)
        for pixels, start, end in ((columns, boxes[:, 0], boxes[:, 2]), (rows, boxes[:, 1], boxes[:, 3]))
    )
    grid = torch.stack([x[:, None].expand(-1, y.shape[1], -1), y[:, :, None].expand(-1, -1, x.shape[1])], -1)
    return F.grid_sample(masks[:, None], grid.to(masks.dtype), align_corners=False)[:, 0]
