"""Exponential moving average of a network's weights, kept and scored beside them."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import chain

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from linvit.errors import UserError


class Average(nn.Module):
    """A copy of a network that trails it: average = decay * average + (1 - decay) * weight.

    As in timm's `ModelEma`, which DeiT, CSwin and SOFT use: it starts from the initial weights, the decay has no
    warm-up, float buffers are averaged like weights, integer buffers are copied. torch's `AveragedModel` instead takes
    over the weights at its first update, and averages integers. It is a part of the task, so a checkpoint holds it as
    it holds the weights, whoever reads it.

    Args:
        network: What to average.
        decay: Share of the average that an update keeps, in [0, 1).

    Attributes:
        network: The copy; needs no gradient.
        updates: How many there were. Without any, the copy is nothing worth scoring.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise UserError(f"ema_decay must lie in [0, 1), such as 0.9999, or be null for no average; got {decay}")
        self.network = deepcopy(network).requires_grad_(False)
        self.updates = 0
        self._blend = get_ema_multi_avg_fn(decay)

    def forward(self, images: Tensor) -> Tensor:
        """What the averaged network makes of images (B, 3, H, W)."""
        return self.network(images)  # type: ignore[no-any-return]

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Takes in the weights after an optimiser step."""
        averages, weights = [], []
        for average, weight in zip(_tensors(self.network), _tensors(network), strict=True):
            if average.is_floating_point():
                averages.append(average)
                weights.append(weight)
            else:
                average.copy_(weight)
        self._blend(averages, weights, self.updates)
        self.updates += 1


def check_averaging(trainer: Trainer) -> None:
    """Raises a `UserError` for a run in which an average could not be kept right."""
    sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
    if sharded or trainer.precision in ("bf16-true", "16-true"):  # bfloat16 loses changes below 1/256
        raise UserError(
            "a moving average needs whole weights in float32: with --model.ema_decay, take a strategy that does not "
            "shard the model, such as ddp, and --trainer.precision=bf16-mixed, 16-mixed or 32-true"
        )


def _tensors(network: nn.Module) -> Iterator[Tensor]:
    return chain(network.parameters(), network.buffers())
