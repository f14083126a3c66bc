"""Saves and ends a run after a signal to stop."""

import signal
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed

from linvit.callbacks.save_checkpoints import SaveCheckpoints
from linvit.io.signals import STOP, Stopped


class StopOnSignal(Callback):
    """Ends training at the first optimiser step, or the first batch of validation, after a signal.

    All ranks agree on it, whichever has received the signal: they exchange a number after every optimiser step and
    every batch of validation, on the CPU, without synchronising with a GPU. It is read after the next one, so no rank
    waits for a slower one either: several ranks stop one step later. The state of the run is saved. A validation
    that was interrupted has no score: the resumed run starts it again.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._sent: tuple[torch.Tensor, Any] | None = None  # the exchange in progress
        self._step = 0
        self._rounds: list[int] = []
        self._stopped: Stopped | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Connects the ranks."""
        if stage == "fit" and trainer.world_size > 1:
            self._group = distributed.new_group(backend="gloo")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Enables saving, and disables Lightning's handling of signals, which would wait for all ranks."""
        STOP.take_handlers()
        # Otherwise it asks rank 0 before each batch for a signal that it no longer gets, and synchronises.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self._step, self._sent = trainer.global_step, None
        STOP.deferred = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Saves after an optimiser step. The run ends in the next hook, when the step's metrics are written."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._save_if_asked(trainer)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Ends the run if its state is saved."""
        self._end_if_saved()

    on_train_epoch_end = on_train_batch_start  # after the last step of an epoch

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Does the same before validation; agrees on the number of batches of all ranks."""
        self._end_if_saved()
        if STOP.deferred:
            batches = [count if isinstance(count, int) else 0 for count in trainer.num_val_batches]  # inf is unknown
            least = torch.tensor(batches)
            if self._group is not None:
                distributed.all_reduce(least, distributed.ReduceOp.MIN, self._group)
            self._rounds = least.tolist()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Ends the run within validation."""
        _, _, batch_idx, *loader = args
        if STOP.deferred and batch_idx < self._rounds[loader[0] if loader else 0]:
            self._save_if_asked(trainer)
            self._end_if_saved()

    def _save_if_asked(self, trainer: Trainer) -> None:
        if by := self._asked():
            STOP.agree(signal.Signals(by))
            for callback in trainer.checkpoint_callbacks:
                if isinstance(callback, SaveCheckpoints):
                    callback.save(trainer)
            self._stopped = Stopped(signal.Signals(by), trainer.global_step)

    def _asked(self) -> int:
        """Returns a signal that a rank had received before the previous call; 0 if none had."""
        if self._group is None or STOP.agreed:
            return STOP.received or 0
        own, before = torch.tensor(STOP.received or 0), self._sent
        work = distributed.all_reduce(own, distributed.ReduceOp.MAX, self._group, async_op=True)
        self._sent = own, work
        if before is None:
            return 0
        before[1].wait()
        return int(before[0])

    def _end_if_saved(self) -> None:
        if self._stopped is not None:
            raise self._stopped
