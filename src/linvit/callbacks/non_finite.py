"""Skips steps whose loss or gradient is not finite, and ends a run in which they persist."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from linvit.analysis.non_finite import bad_samples, find_non_finite
from linvit.callbacks.common import gather
from linvit.errors import UserError, check_number, quote_first
from linvit.finite import is_running_statistic, not_finite


class _Batch(NamedTuple):
    """A computed batch, and its result when the device has done its work."""

    batch: Any
    flags: Tensor  # True if gradient and loss are not finite, bool (2,), on the CPU
    ready: torch.cuda.Event | None  # when they can be read; None means now
    step: int | None  # number of the optimiser step that followed; None if gradients are accumulated further


class NonFiniteGuard(Callback):
    """Skips each optimiser step whose loss or gradient is not finite, on all devices, and reports the layer.

    A skipped step does not change the weights, the optimiser's state or the running statistics of BatchNorm; the
    schedule continues. One micro-batch of an accumulated step is enough to skip it. The first of several skipped steps
    in a row is reported: its batch is computed again, to name the samples and the first layer whose output or
    gradient is not finite. `skipped_steps`, the number so far, is logged.

    With `16-mixed` the loss scaler skips steps while it searches for its scale. These do not count.

    The decision to skip is made on the device. The host reads it one batch later, so that it never waits
    for a GPU; batches are kept until then.

    Args:
        enabled: Enable all of this.
        stop_after: Number of skipped steps in a row that ends the run; a shorter run ends if all its steps are skipped.
    """

    def __init__(self, enabled: bool = True, stop_after: int = 10) -> None:
        check_number("non_finite.stop_after", stop_after, at_least=1, whole=True)
        self.enabled = enabled
        self.stop_after = stop_after
        self.skipped = self.in_a_row = 0
        self._first, self._lost = "", False  # description of the first skipped step, and of lost weights
        self._step: int | None = None
        self._waiting: _Batch | None = None
        self._suspect: Any = None  # first batch of the step whose gradient is not finite
        self._loss_is_bad = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collects the running statistics to restore."""
        network: nn.Module = pl_module.network  # type: ignore[assignment]
        self._statistics = [value for name, value in network.named_buffers() if is_running_statistic(name)]
        self._kept = [value.clone() for value in self._statistics]
        self._sharded = isinstance(trainer.strategy, FSDPStrategy | ModelParallelStrategy)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Sets the gradient of a non-finite loss to NaN, so that all devices see it; other gradients are unchanged."""
        if self.enabled:
            self._loss = loss.detach()
            nothing = 0 * self._loss
            loss.register_hook(lambda gradient: gradient + nothing)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the gradient, whose square must not overflow either: it enters the optimiser's state."""
        if not self.enabled:
            return
        gradients = [weight.grad for weight in pl_module.parameters() if weight.grad is not None]
        local = [cast("Any", grad).to_local() if hasattr(grad, "to_local") else grad for grad in gradients]
        self._bad = ~get_total_norm(local).float().square().isfinite().to(pl_module.device)
        if self._sharded:  # each device has a part of the gradient
            bad = self._bad.float()
            torch.distributed.all_reduce(bad, torch.distributed.ReduceOp.MAX)
            self._bad = bad.bool()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Skips the step if the gradient is not finite."""
        if not self.enabled:
            return
        self._step = trainer.global_step
        if self._statistics:
            self._restore_statistics()
        if all(group.get("fused") for group in optimizer.param_groups):
            optimizer.found_inf = self._bad.float()  # type: ignore[attr-defined]  # as torch's GradScaler sets it
        elif self._bad:
            optimizer.zero_grad()  # without a gradient the optimiser has nothing to do

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Counts and reports a skipped step, on a GPU that of the previous batch, and logs their number."""
        _, batch, *_ = args
        if not self.enabled:
            return
        flags = torch.stack([self._bad, ~self._loss.isfinite()]).to("cpu", non_blocking=True)
        last = _Batch(batch, flags, _work_so_far(pl_module.device), self._step)
        self._step = None
        due = last if last.ready is None else self._waiting
        self._waiting = None if last.ready is None else last
        self._look(trainer, pl_module, due)
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            pl_module.log("skipped_steps", float(self.skipped))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks the last batch of the epoch."""
        self._look(trainer, pl_module, self._waiting)
        self._waiting = None

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Releases the batches."""
        self._waiting = self._suspect = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of skipped steps, for the checkpoint."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the count."""
        self.skipped = state_dict["skipped"]

    def _restore_statistics(self) -> None:
        """Stores the running statistics of a good step, and restores them after a bad one."""
        now, kept = (torch.cat([value.flatten() for value in values]) for values in (self._statistics, self._kept))
        chosen = torch.where(self._bad | ~now.isfinite(), kept, now).split([v.numel() for v in self._kept])
        for value, part in zip([*self._kept, *self._statistics], chosen * 2, strict=True):
            value.copy_(part.view_as(value))

    def _look(self, trainer: Trainer, task: LightningModule, last: _Batch | None) -> None:
        if last is None:
            return
        if last.ready is not None:
            last.ready.synchronize()
        gradient_is_bad, loss_is_bad = last.flags.tolist()
        self._loss_is_bad |= loss_is_bad
        if gradient_is_bad and self._suspect is None:
            self._suspect = last.batch
        if last.step is not None:
            if gradient_is_bad:
                self._count(trainer, task, last.step)
            else:
                self.in_a_row = 0
            self._suspect, self._loss_is_bad = None, False

    def _count(self, trainer: Trainer, task: LightningModule, step: int) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        loss_is_bad = trainer.strategy.reduce_boolean_decision(self._loss_is_bad, all=False)
        if scaler is not None and not loss_is_bad and scaler.get_scale() >= 1:
            return  # it is searching for its scale
        self.skipped += 1
        self.in_a_row += 1
        if self.in_a_row == 1:
            self._first, self._lost = report(trainer, task, self._suspect, layers=not self._sharded)
            rank_zero_warn(f"step {step} is skipped: its loss or gradient is not finite. {self._first}")
        if self.in_a_row >= min(self.stop_after, trainer.estimated_stepping_batches) or self._lost:
            why = f"loss or gradient was not finite in {self.in_a_row} steps in a row (--non_finite.stop_after)"
            precision = "" if trainer.precision == "32-true" else "set --trainer.precision=32-true, "
            raise UserError(
                f"training stopped at step {step}: {'the weights are not finite' if self._lost else why}. "
                f"{self._first}. Lower --model.lr, clip gradients (--trainer.gradient_clip_val=1), {precision}"
                f"or fix the samples that are named. Checkpoints are from before"
            )


def _work_so_far(device: torch.device) -> torch.cuda.Event | None:
    """Returns the event to wait for until a GPU has done its work so far; None for devices that do not run ahead."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def report(trainer: Trainer, task: LightningModule, batch: Any, layers: bool) -> tuple[str, bool]:
    """Computes a batch again and names the first layer whose output or gradient is not finite, and the samples.

    Returns the text of the first rank that finds something, and True if the weights are not finite.
    """
    weights = not_finite(task, {"state_dict": dict(task.named_parameters())})
    found = [_layer(trainer, task, batch)] if layers else []
    if weights:
        found.append(f"the weights {quote_first(weights, 3)} are not finite")
    everyone = gather(("; ".join(filter(None, found)), bool(weights))) or []
    on = "On rank {}: " if len(everyone) > 1 else ""
    texts = [on.format(rank) + text for rank, (text, _) in enumerate(everyone) if text]
    text = texts[0] if texts else "Computed once more, the batch was finite"
    return trainer.strategy.broadcast((text, any(lost for _, lost in everyone)))


def _layer(trainer: Trainer, task: LightningModule, batch: dict[str, Any]) -> str:
    """Names the first layer and the samples; empty if all is finite."""
    size = len(batch["image"])
    inputs = {
        name: rows
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.is_floating_point() and (rows := bad_samples(value, size))
    }
    scaler = getattr(trainer.precision_plugin, "scaler", None)

    def loss() -> Tensor:
        with trainer.precision_plugin.train_step_context():
            value: Tensor = task.training_loss(batch)  # type: ignore[operator]
        return value if scaler is None else value * scaler.get_scale()

    try:
        with isolate_rng(), _buffers_kept(task), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            first = find_non_finite(task.network, loss, size)  # type: ignore[arg-type]
    except Exception as error:  # such as out of memory: the rest is still reported
        return f"The batch could not be computed once more ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if first is None:
        return ""
    rows = next(iter(inputs.values()), first.samples) or list(range(size))
    given = f"; the data itself is not finite there ({', '.join(inputs)})" if inputs else ""
    called = batch.get("id", batch.get("index", range(size)))  # else their numbers in the batch
    names = quote_first([str(called[row]) for row in rows])
    return f"The first is {first.where}, for {len(rows)} of {size} samples: {names}{given}"


@contextmanager
def _buffers_kept(module: nn.Module) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
