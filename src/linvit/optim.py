"""Parameter groups and learning-rate schedules: plain code, one place."""

import math

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: decayed weights, and what is never decayed.

    Not decayed: 1-D tensors (norms, biases) and whatever a submodule names in its `no_weight_decay()`.
    """
    spared = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if callable(getattr(module, "no_weight_decay", None))
        for name in module.no_weight_decay()
    }
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            (plain if parameter.ndim <= 1 or name in spared else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def warmup_cosine_lr(step: int, warmup: int, total: int, peak: float, start: float, end: float) -> float:
    """Learning rate at an optimiser step: linear warm-up, then half a cosine over the whole length.

    The cosine is not shifted by the warm-up, as in the DeiT, Swin and FLatten recipes: the rate steps down slightly
    (factor 0.989 for 20 of 300 epochs) where the warm-up ends.

    Args:
        step: Optimiser steps done.
        warmup: Steps of the warm-up.
        total: Steps of the run; from there on the rate stays at `end`.
        peak: Rate that the warm-up aims at.
        start: Rate of the first step.
        end: Rate of the last step.
    """
    if step < warmup:
        return start + (peak - start) * step / warmup
    total = max(total, 1)
    return end + (peak - end) * (1 + math.cos(math.pi * min(step, total) / total)) / 2


def warmup_cosine(optimizer: Optimizer, warmup: int, total: int, peak: float, start: float, end: float) -> LambdaLR:
    """A scheduler of `warmup_cosine_lr`, to be stepped after every optimiser step."""
    return LambdaLR(optimizer, lambda step: warmup_cosine_lr(step, warmup, total, peak, start, end) / peak)
