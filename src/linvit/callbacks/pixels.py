"""Normalised images as pictures."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


def rgb(images: Tensor) -> Tensor:
    """The first three channels of images (..., C, H, W), or the first one three times where there are fewer."""
    return images[..., :3, :, :] if images.shape[-3] >= 3 else images[..., [0, 0, 0], :, :]


def pixels(images: Tensor, of: Any) -> np.ndarray:
    """Normalised images as pictures.

    Args:
        images: (..., C, H, W).
        of: The data module that normalised them, or its trainer.

    Returns:
        (..., H, W, 3), uint8; see `rgb`.
    """
    data = getattr(of, "datamodule", of)
    mean, std = (torch.tensor(statistic).view(-1, 1, 1) for statistic in (data.mean, data.std))
    shown = rgb(images.float().cpu() * std + mean)
    picture: np.ndarray = (255 * shown).round().clamp(0, 255).to(torch.uint8).movedim(-3, -1).numpy()
    return picture
