"""Makes a resumed run equal to an uninterrupted run."""

import random
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from linvit.callbacks.common import gather
from linvit.errors import UserError

RANDOM_STATE = "random_state"  # in a checkpoint
WITHIN_STEP = "within_step"  # in a checkpoint within an accumulation, whose logged values have the next step


class ExactResume(Callback):
    """Saves and restores the state that a run needs to resume exactly where a checkpoint was written.

    In addition to Lightning's state, this saves the states of the random generators of each rank, and makes the loader
    continue after the trained batches. Gradients are not saved, so checkpoints should be written after an optimiser
    step. Ranks without a state (in a new run all but the first) draw different numbers: Lightning seeds all
    alike, so that each would drop the same paths of its images.
    """

    def __init__(self) -> None:
        self._generators: list[dict[str, Any]] | None = None
        self._loader: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the generators of all ranks, and makes the state of the loops resumable."""
        checkpoint[RANDOM_STATE] = gather(random_state(pl_module.device))
        make_resumable(checkpoint["loops"]["fit_loop"], trainer, _is_resumable(trainer.train_dataloader))
        batches, window = trainer.fit_loop.batch_idx + 1, trainer.accumulate_grad_batches
        if batches % window and batches != trainer.num_training_batches:
            rank_zero_warn(
                f"a checkpoint is written within the accumulation of {window} batches. It has no gradients, so a run "
                f"that is resumed from it differs slightly from this one; write it after an optimiser step"
            )
            checkpoint[WITHIN_STEP] = True

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stores both until training starts: earlier code draws random numbers, and Lightning creates the loader."""
        self._generators = checkpoint.get(RANDOM_STATE)
        if trainer.state.fn == TrainerFn.FITTING:
            loaders = checkpoint["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])
            self._loader = loaders[0] if loaders else {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores both."""
        states: Any = self._generators
        if states is not None:
            own = states[trainer.global_rank % len(states)] if isinstance(states, list) and states else states
            set_random_state(own, pl_module.device)
        if trainer.global_rank >= (len(states) if isinstance(states, list) else 1):
            torch.manual_seed(torch.initial_seed() + trainer.global_rank)
        if not trainer.fit_loop.restarted_mid_epoch:
            trainer.fit_loop.epoch_loop.restarting = False
        elif self._loader:
            self._place_loader(trainer)
        self._generators, self._loader = None, {}

    def _place_loader(self, trainer: Trainer) -> None:
        """Lets the loader continue within the epoch, and sets Lightning's batch counts accordingly."""
        trainer.fit_loop.setup_data()  # what trainer.reload_dataloaders_every_n_epochs asks for, while it does no harm
        loader: Any = trainer.train_dataloader
        if not _is_resumable(loader):
            return
        loader.load_state_dict(self._loader)
        progress = vars(trainer.fit_loop.epoch_loop.batch_progress.current)
        later = loader.batches_done - progress["processed"]  # not 0 in another layout
        progress.update({name: value + later for name, value in progress.items()})
        if progress["processed"] >= trainer.num_training_batches:  # trainer.limit_train_batches
            loader.end_epoch()


def _is_resumable(loader: Any) -> bool:
    """True if a loader can continue in the middle of an epoch, as linvit's can."""
    return hasattr(loader, "batches_done") and hasattr(loader, "end_epoch")


def make_resumable(loops: dict[str, Any], trainer: Trainer, resumable: bool) -> None:
    """Changes the state of the fit loop in a checkpoint, in place."""
    epoch, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    validation = loops["epoch_loop.val_loop.batch_progress"]
    if epoch["current"]["started"] == epoch["current"]["processed"]:  # between two epochs, or in the hooks of an end
        for progress in epoch.values():
            _set(progress, progress["processed"])
    _set(validation["total"], 0)
    now = batches["current"]
    if not trainer.training or now["completed"] == now["processed"]:
        seen = validation["current"]
        if trainer.validating and not (validation["is_last_batch"] and seen["completed"] == seen["ready"]):
            _unfinished(validation)
        return
    # within on_train_batch_end, which is before validation
    validates = _validation_follows(trainer, now["ready"])
    if validates or (resumable and now["ready"] == trainer.num_training_batches):
        for progress in (now, batches["total"]):
            progress["completed"] = progress["processed"]
        if validates:
            _unfinished(validation)
        else:
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1


def _unfinished(validation: dict[str, Any]) -> None:
    """Makes it a validation whose first batch has started, which Lightning then repeats."""
    for name in ("total", "current"):
        _set(validation[name], 0)
        validation[name] |= {"ready": 1, "started": 1}
    validation["is_last_batch"] = False


def _set(progress: dict[str, int], value: int) -> None:
    progress.update(dict.fromkeys(progress, value))


def _validation_follows(trainer: Trainer, batch: int) -> bool:
    """Returns True if Lightning validates after this batch of the epoch."""
    every = trainer.check_val_every_n_epoch
    if not trainer.enable_validation or (every is not None and (trainer.current_epoch + 1) % every):
        return False
    if every is None:
        batch = trainer.fit_loop.total_batch_idx + 1
    interval = trainer.val_check_batch
    return interval not in (None, float("inf")) and batch % int(interval) == 0


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of every global generator."""
    numbers: dict[str, Any] = np.random.get_state(legacy=False)
    numbers["state"] = {**numbers["state"], "key": numbers["state"]["key"].tolist()}
    state = {"torch": torch.get_rng_state(), "numpy": numbers, "python": random.getstate()}
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Sets every global generator to a state that `random_state` returned; another device's keeps its own."""
    try:
        numbers = state["numpy"]["state"]
        if not 0 <= numbers["pos"] <= len(numbers["key"]):  # numpy does not check
            raise ValueError(f"numpy's generator has no number {numbers['pos']}")
        np.random.set_state({**state["numpy"], "state": {**numbers, "key": np.array(numbers["key"], np.uint32)}})
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"].cpu().clone())  # of a view torch would read memory before it, or crash
        if device.type in state:
            torch.get_device_module(device).set_rng_state(state[device.type].cpu().clone())
    except Exception as error:  # states of any content
        raise UserError(f"the states of random generators in the checkpoint cannot be used: {error}") from error
