"""What is done to a whole batch on the device: the operations that were left to it, normalising, erasing."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.data.transforms.affine import Matrix
from linvit.data.transforms.ops import DeviceOps, Op, Warp
from linvit.data.transforms.pixel_ops import OPERATIONS
from linvit.data.transforms.random_erasing import erase_


def finish(images: Tensor, plans: Sequence[DeviceOps], mean: Tensor, std: Tensor) -> Tensor:
    """8-bit images (B, 3, H, W) as the model takes them: changed, normalised, erased, float32.

    Args:
        images: On any device.
        plans: One per image; none for images that are only normalised.
        mean: Of values in [0, 1], (3, 1, 1), on the same device.
        std: Likewise.
    """
    if any(plan.ops for plan in plans):
        images = apply_ops(images, [plan.ops for plan in plans])
    normal = images.float().sub_(255 * mean).div_(255 * std)
    if plans:
        erase_(normal, plans)
    return normal


def apply_ops(images: Tensor, ops: Sequence[Sequence[Op | Warp]]) -> Tensor:
    """Does its own operations to every image, those of one kind together."""
    images = images.clone()
    for layer in range(max(map(len, ops))):
        alike: dict[Any, list[tuple[int, Any]]] = defaultdict(list)
        for i, own in enumerate(ops):
            if layer < len(own):
                step = own[layer]
                if isinstance(step, Op):
                    alike[step.name].append((i, step.amount))
                else:
                    alike[step.bicubic, step.fill].append((i, step.matrix))
        for kind, members in alike.items():
            rows = torch.tensor([i for i, _ in members]).to(images.device, non_blocking=True)
            amounts = [amount for _, amount in members]
            if isinstance(kind, str):
                amount = torch.tensor(amounts).to(images.device, non_blocking=True).view(-1, 1, 1, 1)
                changed = OPERATIONS[kind](images[rows], amount)
            else:
                changed = warp(images[rows], amounts, *kind)
            images[rows] = changed
    return images


def warp(images: Tensor, matrices: Sequence[Matrix], bicubic: bool, fill: Sequence[int]) -> Tensor:
    """Affine maps of 8-bit images (n, 3, H, W), each by its own matrix, else like `linvit.data.transforms.affine.warp`.

    torch interpolates with Keys' kernel at a = -0.75 where PIL has a = -1, so bicubic results differ a little at edges.
    """
    height, width = images.shape[-2:]
    device = images.device
    x, y = torch.arange(width, device=device) + 0.5, torch.arange(height, device=device) + 0.5
    places = torch.stack([x.expand(height, -1), y[:, None].expand(-1, width), x.new_ones(height, width)], -1)
    maps = torch.tensor(matrices, dtype=torch.float32).to(device, non_blocking=True).view(-1, 1, 2, 3)
    grid = places @ maps.mT  # (H, W, 3) @ (n, 1, 3, 2) -> (n, H, W, 2)
    grid = grid / grid.new_tensor([width, height])  # 0 to 1 within the image
    mode = "bicubic" if bicubic else "bilinear"
    moved = F.grid_sample(images.float(), 2 * grid - 1, mode, padding_mode="border", align_corners=False)
    inside = ((grid >= 0) & (grid < 1)).all(-1)[:, None]  # (n, 1, H, W)
    colour = moved.new_tensor(fill).view(3, 1, 1)
    return torch.where(inside, moved.clamp_(0, 255), colour).to(torch.uint8)
