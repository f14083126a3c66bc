"""How a network is executed, which changes no result: with less memory, and on several devices."""

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from linvit.errors import UserError


def checkpoint_gradients(network: nn.Module) -> None:
    """Has a network compute activations anew in the backward pass instead of keeping them.

    Raises:
        UserError: If it cannot.
    """
    try:
        network.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError) as error:  # timm asserts that it can
        raise UserError(
            f"{type(network).__name__} has no gradient checkpointing; set --model.grad_checkpointing=false and lower "
            f"--data.batch_size, with --trainer.accumulate_grad_batches to make up for it"
        ) from error


def same_buffers(task: LightningModule) -> None:
    """Gives all devices the buffers of the first one, whose checkpoint is kept, and ends their exchange per forward.

    Each device evaluates its own share of the set, and shares differ by one image, so one device may have a batch
    more. DistributedDataParallel sends buffers in every forward pass, evaluation included: that batch would wait for
    ever. `exchange_buffers` turns it on again.
    """
    wrapper = task.trainer.strategy.model
    if isinstance(wrapper, DistributedDataParallel):
        for buffer in task.buffers():
            torch.distributed.broadcast(buffer, 0)
        wrapper.require_forward_param_sync = False


def exchange_buffers(task: LightningModule) -> None:
    """Lets the devices exchange buffers again, as training needs it."""
    wrapper = task.trainer.strategy.model
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.require_forward_param_sync = True
