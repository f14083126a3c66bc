"""What the host tells the device and reads from it, with few waits: after each, the device has nothing to do."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.ops import batched_nms, nms


def constants(values: Sequence[float], like: Tensor) -> Tensor:
    """Returns numbers (n,) with the dtype and on the device of a tensor; unlike `new_tensor`, without a wait."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)


def positions(masks: Sequence[Tensor]) -> list[Tensor]:
    """Returns where each of the masks (n_i,) is true, in their order; the host waits once for all of them."""
    if torch.compiler.is_exporting():
        return [mask.nonzero()[:, 0] for mask in masks]
    counts = torch.stack([mask.count_nonzero() for mask in masks]).tolist()
    return [mask.nonzero_static(size=count)[:, 0] for mask, count in zip(masks, counts, strict=True)]


def nms_in_groups(boxes: Tensor, scores: Tensor, groups: Tensor, iou: float) -> Tensor:
    """Returns what torchvision's `batched_nms` does of boxes (n, 4), with one wait on CUDA in place of two or more.

    There it moves the boxes of each group away from the others', so that one call does for all, but makes the step
    from a number of the host's.
    """
    if not boxes.is_cuda or not 0 < boxes.numel() <= 100_000:
        kept: Tensor = batched_nms(boxes, scores, groups, iou)
    else:
        kept = nms(boxes + (groups.to(boxes) * (boxes.max() + 1))[:, None], scores, iou)
    return kept
