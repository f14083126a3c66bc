"""The run's settings beside what they led to, for TensorBoard's table of runs (HPARAMS)."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger


class FinalScore(Callback):
    """Writes the hyper-parameters with the last score of each kind of weights, when training has ended well.

    The tags `final/score` and `final/ema_score` are their own: TensorBoard writes them as a curve of one point.
    """

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes."""
        scores = {
            f"final/{name}": trainer.callback_metrics[f"val/{name}"].item()
            for name in ("score", "ema_score")
            if f"val/{name}" in trainer.callback_metrics
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and scores:
                logger.log_hyperparams(dict(logger.hparams), scores, trainer.global_step)
