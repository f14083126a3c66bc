"""BatchNorm over the batches of all ranks."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from timm.layers import convert_sync_batchnorm
from torch import nn

from linvit.errors import UserError


class SyncBatchNorm(TorchSyncBatchNorm):
    """What `--trainer.sync_batchnorm` does, but timm's `BatchNormAct2d` keeps the activation that it holds.

    torch's own conversion, which is Lightning's, leaves it out without a word.
    """

    def apply(self, model: nn.Module) -> nn.Module:
        """Replaces each BatchNorm."""
        return convert_sync_batchnorm(model)  # type: ignore[no-any-return,no-untyped-call]

    def revert(self, model: nn.Module) -> nn.Module:
        """Leaves the model as it is: without other ranks, it computes what BatchNorm does."""
        return model


def with_sync_batch_norm(plugins: Any) -> list[Any]:
    """The plug-ins of a configuration and `SyncBatchNorm`."""
    given = plugins if isinstance(plugins, list) else [plugins] if plugins else []
    return [*given, SyncBatchNorm()]


def check_sync_batch_norm(trainer: Trainer) -> None:
    """Raises a `UserError` where torch cannot do it."""
    if trainer.world_size > 1 and isinstance(trainer.accelerator, CPUAccelerator):
        raise UserError("torch normalises batches over several ranks on GPUs only: leave out --trainer.sync_batchnorm")
