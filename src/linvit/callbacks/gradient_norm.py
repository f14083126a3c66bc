"""The norm of the gradient, before it is clipped."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer


class GradientNorm(Callback):
    """Logs `grad_norm`, the L2 norm over all parameters, as the optimiser gets it: unscaled, accumulated, not clipped.

    It is computed only in steps that are logged (`trainer.log_every_n_steps`), and not if the strategy shards the
    model, since each device then holds a part of the gradient.
    """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Logs the norm, after the backward pass and before clipping."""
        logged = (trainer.global_step + 1) % trainer.log_every_n_steps == 0  # type: ignore[attr-defined]
        if logged and not isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            gradients = [weight.grad for weight in pl_module.parameters() if weight.grad is not None]
            pl_module.log("grad_norm", get_total_norm(gradients))
