"""Features of regions of interest (RoIs): each box is cut out of the map that fits its size, at a fixed size.

Papers: He et al. 2017, "Mask R-CNN", Sec. 3 (RoIAlign); Lin et al. 2017, "Feature Pyramid Networks for Object
Detection", Eq. 1 (the level).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.ops import roi_align

from linvit.attention.ops.precision import upcast


def roi_levels(boxes: Tensor, finest_scale: float, count: int) -> Tensor:
    """Returns for each of boxes (n, 4) which of `count` maps it is cut out of, (n,).

    It is the finest where the square root of the box's area is less than twice `finest_scale`, in pixels.
    """
    sides = (boxes[:, 2:] - boxes[:, :2]).prod(1).sqrt()
    return (sides / finest_scale + 1e-6).log2().floor().clamp(0, count - 1).long()


def roi_features(
    maps: Sequence[Tensor], boxes: Sequence[Tensor], reductions: Sequence[int], size: int, finest_scale: float
) -> Tensor:
    """Returns the features (n, C, size, size) of the boxes of all images, from maps (B, C, H_i, W_i).

    `torchvision.ops.MultiScaleRoIAlign` differs: it is half a pixel off (`aligned=False`), as Mask R-CNN's first
    version was. The operator itself is torchvision's, with as many samples as a box has pixels.

    Args:
        maps: The finest first.
        boxes: Of each of B images, (n_i, 4).
        reductions: Image side over map side of each map.
        size: Side of the result.
        finest_scale: See `roi_levels`.
    """
    flat = torch.cat(list(boxes))
    counts = torch.tensor([len(of_image) for of_image in boxes])
    image = torch.arange(len(boxes)).repeat_interleave(counts).to(flat)
    rois = torch.cat([image[:, None], flat], 1)  # (n, 5)
    level = roi_levels(flat, finest_scale, len(maps))
    dtype = torch.promote_types(maps[0].dtype, torch.float32)
    rows = [(level == i).nonzero()[:, 0] for i in range(len(maps))]
    cut = [  # also where there is no box, so that every map has a gradient
        roi_align(upcast(x), rois[row].to(dtype), size, 1 / reduction, sampling_ratio=0, aligned=True)
        for x, row, reduction in zip(maps, rows, reductions, strict=True)
    ]
    return torch.cat(cut).index_select(0, torch.cat(rows).argsort()).to(maps[0].dtype)
