"""What the ranks of a run have, together."""

from typing import Any

import torch
from lightning.pytorch import Trainer


def gather(own: Any, trainer: Trainer) -> list[Any]:
    """What each rank has, in their order, on all of them. All must call it."""
    if trainer.world_size == 1:
        return [own]
    parts: list[Any] = [None] * trainer.world_size
    torch.distributed.all_gather_object(parts, own)
    return parts
