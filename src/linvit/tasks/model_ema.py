"""Exponential moving average (EMA) of a network's weights, kept and scored beside them."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from linvit.errors import UserError, check_number
from linvit.finite import is_running_statistic


class ModelEma(nn.Module):
    """A copy of a network that trails it: average = decay * average + (1 - decay) * weight.

    Parameters and the running statistics of BatchNorm are averaged. Every other buffer is copied, since an average of
    it means nothing: the mean of two random projections is no longer orthogonal. As in timm's `ModelEma`, which
    DeiT, CSwin and SOFT use, the average starts from the initial weights, and the decay has no warm-up; torch's
    `AveragedModel` takes over the weights at its first update.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        super().__init__()
        check_number("ema_decay", decay, at_least=0, below=1, note=", such as 0.9999, or null for no average")
        self.network = deepcopy(network).requires_grad_(False)
        self.decay = decay
        self.updates = 0

    def forward(self, images: Tensor, **options: Any) -> Tensor:
        """Returns the averaged network's output for images (B, 3, H, W); options are the network's own."""
        return self.network(images, **options)  # type: ignore[no-any-return]

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Moves the average towards the weights after an optimiser step."""
        average = get_ema_multi_avg_fn(self.decay)
        average(list(_averaged(self.network)), list(_averaged(network)), self.updates)
        for own, other in zip(_copied(self.network), _copied(network), strict=True):
            own.copy_(other)
        self.updates += 1


class WeightAveraging(Callback):
    """Moves the average of a task, if it has one, after each optimiser step.

    Lightning's `EMAWeightAveraging` puts the averaged weights in the place of the others for a validation, so it gives
    one score for both, and its average takes over the weights at its first update.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raises a `UserError` if the average would be wrong: of sharded or half-precision weights."""
        sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)
        half = trainer.precision in ("bf16-true", "16-true")  # bfloat16 loses changes below 1/256
        if stage == "fit" and pl_module.ema is not None and (sharded or half):
            raise UserError(
                "a moving average needs whole weights in float32: with --model.ema_decay, take a strategy that does "
                "not shard the model, such as ddp, and --trainer.precision=bf16-mixed, 16-mixed or 32-true"
            )

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Registers the average at the optimiser."""
        if pl_module.ema is not None:
            trainer.optimizers[0].register_step_post_hook(lambda *_: pl_module.ema.update(pl_module.network))


def _averaged(network: nn.Module) -> Iterator[Tensor]:
    yield from network.parameters()
    yield from (buffer for name, buffer in network.named_buffers() if is_running_statistic(name))


def _copied(network: nn.Module) -> Iterator[Tensor]:
    return (buffer for name, buffer in network.named_buffers() if not is_running_statistic(name))
