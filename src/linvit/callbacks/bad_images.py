"""A warning at the end of an epoch in which images were skipped."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn


class BadImageCount(Callback):
    """Warns after each training epoch in which bad images were skipped, with the file that names them."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warns of those of all devices."""
        bad = getattr(getattr(trainer, "datamodule", None), "bad_images", None)
        if bad is None:
            return
        mine = torch.tensor(bad.since_last(), device=pl_module.device)
        skipped = int(trainer.strategy.reduce(mine, reduce_op="sum"))
        if skipped:
            named = f"; they are named in '{bad.report}'" if bad.report else ""
            rank_zero_warn(
                f"epoch {trainer.current_epoch}: {skipped} training images could not be decoded and others took their "
                f"place{named}"
            )
