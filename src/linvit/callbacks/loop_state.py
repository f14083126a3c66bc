"""The loops of Lightning in a checkpoint, so that a run resumes from it exactly where it was.

Lightning resumes within an epoch, but not from everywhere: it leaves out the validation that follows the batch after
which a checkpoint was written, and all that belongs to the end of an epoch after the last one; a run of
`trainer.max_steps` leaves out the epoch after a checkpoint of an epoch's end.
"""

from typing import Any

from lightning.pytorch import Trainer


def make_resumable(loops: dict[str, Any], trainer: Trainer, resumable: bool) -> None:
    """Changes the state of the fit loop, as a checkpoint has it, in place.

    Args:
        loops: Progress of the loops by name, `checkpoint["loops"]["fit_loop"]`.
        trainer: That writes the checkpoint.
        resumable: Whether the loader continues where it was; another one would start the epoch again at its end.
    """
    epoch, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    validation = loops["epoch_loop.val_loop.batch_progress"]
    if epoch["current"]["started"] == epoch["current"]["processed"]:  # between two epochs, or in the hooks of an end
        for progress in epoch.values():
            _set(progress, progress["processed"])
    _set(validation["total"], 0)
    now = batches["current"]
    if not trainer.training or now["completed"] == now["processed"]:
        if trainer.validating and not _validated(validation):
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


def _validated(validation: dict[str, Any]) -> bool:
    now = validation["current"]
    return bool(validation["is_last_batch"] and now["completed"] == now["ready"])


def _unfinished(validation: dict[str, Any]) -> None:
    """Makes it a validation whose first batch has started, which Lightning starts again."""
    for name in ("total", "current"):
        _set(validation[name], 0)
        validation[name] |= {"ready": 1, "started": 1}
    validation["is_last_batch"] = False


def _set(progress: dict[str, int], value: int) -> None:
    progress.update(dict.fromkeys(progress, value))


def _validation_follows(trainer: Trainer, batch: int) -> bool:
    """Whether Lightning validates after so many batches of the epoch."""
    every = trainer.check_val_every_n_epoch
    if not trainer.enable_validation or (every is not None and (trainer.current_epoch + 1) % every):
        return False
    if every is None:
        batch = trainer.fit_loop.total_batch_idx + 1
    interval = trainer.val_check_batch
    return interval not in (None, float("inf")) and batch % int(interval) == 0
