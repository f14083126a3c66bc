"""The run's hyper-parameters beside its scores, for TensorBoard's table of runs (HPARAMS)."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger


class FinalScore(Callback):
    """Writes the hyper-parameters with the last scores of the weights and of their average, when training has ended.

    The tags `final/score` and `final/ema_score` are their own: TensorBoard writes them as a curve of one point.
    """

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes both to TensorBoard."""
        scores = {
            f"final/{name}": trainer.callback_metrics[f"val/{name}"].item()
            for name in ("score", "ema_score")
            if f"val/{name}" in trainer.callback_metrics
        }
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and scores:
                logger.log_hyperparams(dict(logger.hparams), scores, trainer.global_step)
