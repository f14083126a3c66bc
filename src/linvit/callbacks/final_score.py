"""The run's hyper-parameters beside its scores, for TensorBoard's table of runs (HPARAMS)."""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard.summary import hparams


class FinalScore(Callback):
    """Names the hyper-parameters to TensorBoard, and the scores that its table shows beside them.

    Those are the last values of `val/score` and, with a moving average, of `val/ema_score`.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the names to TensorBoard."""
        scores = dict.fromkeys(["val/score", "val/ema_score"][: 2 if pl_module.hparams.get("ema_decay") else 1], 0.0)
        for logger in trainer.loggers if trainer.is_global_zero and trainer.enable_validation else ():
            if isinstance(logger, TensorBoardLogger):
                for summary in hparams(dict(_flat(dict(logger.hparams))), scores):
                    logger.experiment.file_writer.add_summary(summary)


def _flat(options: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested options by path, with the values that TensorBoard takes."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}/")
        else:
            yield before + name, value if isinstance(value, bool | int | float | str) else str(value)
