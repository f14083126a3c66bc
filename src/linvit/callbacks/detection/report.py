"""The average precision of each class as a table, precision over recall as a picture, and how long evaluation takes."""

import time
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from PIL import Image

from linvit.callbacks.report import Report, write_classes, write_picture
from linvit.callbacks.tensorboard import add_picture, current_step, writers
from linvit.plain_text import markdown_table

LONG = 10  # seconds of COCO's evaluation that are worth a line


class DetectionReport(Report):
    """Writes `val_classes.csv` (class, objects, box_AP, ...) and `val_precision_recall.png`; after a test, `test_...`.

    Training reports each validation, and writes both to TensorBoard, too. They are of the weights that
    `predict_with` names. The task offers `results(stage)`, whose `evaluations` are COCO's of boxes and masks and whose
    `objects` are the true ones of each class, on rank 0. How many seconds the detections of the set took, and COCO's
    figures after them, is logged as `seconds/detection` and `seconds/coco_evaluation`.

    Args:
        folder: Where to write; null is the folder of the logger, and nothing is written without one.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__(folder)
        self._started = 0.0

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        self._started = time.perf_counter()

    on_test_epoch_start = on_validation_epoch_start

    def collect(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> Any:
        """COCO's evaluations, and how many objects each class has; logs how long they took."""
        detected = time.perf_counter()
        results = cast("Any", pl_module).results(stage)
        detection, evaluation = detected - self._started, time.perf_counter() - detected
        if evaluation > LONG:
            rank_zero_info(f"detection took {detection:.0f} s, COCO's evaluation {evaluation:.0f} s")
        for logger in trainer.loggers if stage == "val" and not trainer.sanity_checking else ():
            seconds = {"seconds/detection": detection, "seconds/coco_evaluation": evaluation}
            logger.log_metrics(seconds, current_step(trainer))
        return dict(results.evaluations), results.objects

    def write(self, found: Any, trainer: Trainer, pl_module: LightningModule, folder: Path, stage: str) -> str:
        """Writes the table and the curves."""
        from linvit.callbacks.detection.curves import curves_picture  # here, since matplotlib takes half a second

        evaluations, objects = found
        scores = {
            f"{kind}_{name}": values
            for kind, each in evaluations.items()
            for name, values in each.class_scores().items()
        }
        table = folder / f"{stage}_classes.csv"
        rows = write_classes(table, pl_module, "objects", objects, scores)
        picture = curves_picture({kind: each.precision for kind, each in evaluations.items()})
        write_picture(folder / f"{stage}_precision_recall.png", Image.fromarray(picture))
        add_picture(trainer, f"{stage}/precision_recall", picture)
        for writer in writers(trainer):
            writer.add_text(f"{stage}/classes", markdown_table(rows), current_step(trainer))
        return f"average precision of each class: {table}"
