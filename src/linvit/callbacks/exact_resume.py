"""A resumed run is the run that was not interrupted."""

from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from linvit.callbacks.gather import gather
from linvit.callbacks.loop_state import make_resumable
from linvit.callbacks.random_state import random_state, set_random_state

RANDOM_STATE = "random_state"  # in a checkpoint
WITHIN_STEP = "within_step"  # in one that was written within an accumulation, where what is logged has the next step


@runtime_checkable
class Resumable(Protocol):
    """A loader that can continue in the middle of an epoch."""

    @property
    def batches_done(self) -> int:
        """Batches of the epoch that had their turn, in the present numbers of ranks and of samples per batch."""

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch has come."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next pass continue there."""

    def end_epoch(self) -> None:
        """Leaves out the rest of that pass."""


class ExactResume(Callback):
    """Saves what a run needs to continue exactly where a checkpoint was written, and restores it.

    Weights, optimiser, schedule, moving average, gradient scaler and callbacks are in every checkpoint of Lightning.
    This adds the states of the random generators of each rank, and makes the loader continue after the batches
    that were trained on and that Lightning's loops leave nothing out. Gradients are not saved, so checkpoints are to be
    written after an optimiser step, not in the middle of accumulation.

    On another number of ranks each continues with the generators of the rank that had its number, modulo how many there
    were.
    """

    def __init__(self) -> None:
        self._generators: list[dict[str, Any]] | None = None
        self._loader: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the generators of all ranks, and makes the state of the loops one to resume from."""
        checkpoint[RANDOM_STATE] = gather(random_state(pl_module.device), trainer)
        make_resumable(checkpoint["loops"]["fit_loop"], trainer, isinstance(trainer.train_dataloader, Resumable))
        batches, window = trainer.fit_loop.batch_idx + 1, trainer.accumulate_grad_batches
        if batches % window and batches != trainer.num_training_batches:
            rank_zero_warn(
                f"a checkpoint is written within the accumulation of {window} batches. It has no gradients, so a run "
                f"that is resumed from it differs slightly from this one; write it after an optimiser step"
            )
            checkpoint[WITHIN_STEP] = True

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keeps both until training starts: what comes before draws random numbers, and Lightning makes the loader."""
        self._generators = checkpoint.get(RANDOM_STATE)
        if trainer.state.fn == TrainerFn.FITTING:
            loaders = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
            self._loader = loaders[0] if loaders else {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores both."""
        if self._generators is not None:
            states: Any = self._generators
            own = states[trainer.global_rank % len(states)] if isinstance(states, list) and states else states
            set_random_state(own, pl_module.device)
        if not trainer.fit_loop.restarted_mid_epoch:
            trainer.fit_loop.epoch_loop.restarting = False
        elif self._loader:
            self._place_loader(trainer)
        self._generators, self._loader = None, {}

    def _place_loader(self, trainer: Trainer) -> None:
        """Lets the loader continue within the epoch, and has Lightning count the batches as it does."""
        trainer.fit_loop.setup_data()  # what trainer.reload_dataloaders_every_n_epochs asks for, while it does no harm
        loader = trainer.train_dataloader
        if not isinstance(loader, Resumable):
            return
        loader.load_state_dict(self._loader)
        progress = vars(trainer.fit_loop.epoch_loop.batch_progress.current)
        later = loader.batches_done - progress["processed"]  # not 0 in another layout
        progress.update({name: value + later for name, value in progress.items()})
        if progress["processed"] >= trainer.num_training_batches:  # trainer.limit_train_batches
            loader.end_epoch()
